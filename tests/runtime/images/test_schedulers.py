"""Every scheduler against diffusers' own: the same noise, a made-up model, each step compared."""

from __future__ import annotations

import inspect
import re
from typing import Any

import diffusers
import numpy as np
import pytest

from planforge.runtime.errors import InputError, ManifestError
from planforge.runtime.images.noise import Generator
from planforge.runtime.images.scheduler_config import CHOICES, FIXED, SchedulerConfig
from planforge.runtime.images.schedulers import SCHEDULERS, find_scheduler, make_scheduler

from ...helpers.denoising import SEED, Case, compare, denoise, run_ours, run_reference, torch_draw

# What schedulers of diffusers read only with a setting that is refused, or (LCM) never.
UNREAD = {
    "dynamic_thresholding_ratio",
    "sample_max_value",
    "flow_shift",
    "use_dynamic_shifting",
    "time_shift_type",
}
UNREAD_BY_LCM = {"set_alpha_to_one", "timestep_spacing"}
ZERO_SNR = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}
COSINE = {"beta_schedule": "squaredcos_cap_v2"}
LINEAR = {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02}
TRAINED: dict[str, Any] = {
    "num_train_timesteps": 500,
    "trained_betas": np.geomspace(1e-4, 0.05, 500).tolist(),
}
OWN_CLASSES = {
    "pndm": {"_class_name": "PNDMScheduler", "set_alpha_to_one": False, "skip_prk_steps": True},
    "lcm": {"_class_name": "LCMScheduler", "original_inference_steps": 40},
}

PLAIN = [
    Case(name, {"prediction_type": prediction, "timestep_spacing": spacing})
    for name, kind in SCHEDULERS.items()
    for prediction in kind.predictions
    for spacing in CHOICES["timestep_spacing"]
]
COUNTS = [
    Case(name, {"timestep_spacing": spacing}, steps)
    for name in SCHEDULERS
    for steps, spacing in [
        (1, "leading"),
        (1, "trailing"),
        (2, "linspace"),
        (3, "leading"),
        (4, "trailing"),
        (7, "trailing"),
        (50, "leading"),
    ]
]
FROM_PICTURES = [
    Case(name, {"prediction_type": prediction}, steps, strength)
    for name in SCHEDULERS
    for steps, strength, prediction in [
        (20, 0.3, "epsilon"),
        (20, 0.6, "v_prediction"),
        (20, 1.0, "epsilon"),
        (7, 0.6, "epsilon"),
        (4, 0.3, "epsilon"),
    ]
]
OPTIONS = [
    *(Case(name, settings) for name in SCHEDULERS for settings in (LINEAR, TRAINED, {"steps_offset": 0})),
    # Timestep 999 comes twice with Karras: from noise alone diffusers begins at the second, and fails.
    *(Case(name, COSINE, strength=1.0 if name == "dpm++2m_karras" else None) for name in SCHEDULERS),
    *(Case(name, ZERO_SNR) for name in SCHEDULERS),
    Case("ddim", {"clip_sample": True}),
    Case("ddim", {"clip_sample": True, "clip_sample_range": 0.7, "prediction_type": "v_prediction"}),
    Case("ddim", {"set_alpha_to_one": False}),
    Case("ddim", {"set_alpha_to_one": True, "steps_offset": 0}, 7),
    Case("ddim", eta=0.5),
    Case("ddim", {"clip_sample": True, "prediction_type": "sample"}, eta=1.0),
    Case("ddim", {"timestep_spacing": "trailing"}, strength=0.6, eta=1.0),
    Case("pndm", {"set_alpha_to_one": True, "steps_offset": 0}),
    Case("euler", {"use_karras_sigmas": True}),
    Case("euler", {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 9.0}),
    Case("euler", {"final_sigmas_type": "sigma_min"}),
    Case("euler", {"interpolation_type": "log_linear"}),
    Case("euler", {"interpolation_type": "log_linear", "use_karras_sigmas": True}, strength=0.6),
    Case("euler", {"rescale_betas_zero_snr": True}),
    *(
        Case(name, {"final_sigmas_type": last, "lower_order_final": lower, "euler_at_final": euler}, steps)
        for name in ("dpm++2m", "dpm++2m_karras")
        for last in ("zero", "sigma_min")
        for lower, euler in [(True, False), (False, False), (False, True)]
        for steps in (7, 20)
    ),
    Case("dpm++2m", {**COSINE, "lambda_min_clipped": -5.1}),
    Case("dpm++2m", {**COSINE, "lambda_min_clipped": -5.1, "timestep_spacing": "trailing"}),
    Case("dpm++2m", {**COSINE, "lambda_min_clipped": -2.0, "timestep_spacing": "trailing"}, strength=0.6),
    Case("dpm++2m", {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 9.0}),
    Case("dpm++2m", {"solver_type": "bh2"}),
    Case("lcm", {"clip_sample": True, "clip_sample_range": 0.7}, 4),
    Case("lcm", {"original_inference_steps": 100, "timestep_scaling": 0.01}),
    *(Case(name, {}, own=own) for name in SCHEDULERS for own in ("PNDMScheduler", "LCMScheduler")),
]


def name_case(case: Case) -> str:
    return str(case).replace(str(TRAINED["trained_betas"]), "...")


@pytest.mark.parametrize("case", PLAIN, ids=name_case)
def test_each_prediction_and_spacing(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("case", COUNTS, ids=name_case)
def test_few_steps_and_many(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("case", FROM_PICTURES, ids=name_case)
def test_from_a_picture(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("case", OPTIONS, ids=name_case)
def test_each_option(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("name", ["euler_ancestral", "lcm", "ddim"])
def test_a_seed_gives_the_picture_that_it_gives_in_diffusers(name: str) -> None:
    case = Case(name, eta=1.0 if name == "ddim" else 0.0)
    got = run_ours(case, Generator(SEED).normal).samples
    want = run_reference(case).samples
    largest = max(1.0, *(float(np.abs(sample).max()) for sample in want))
    # The noise differs in its last bits, and the factors of the steps add those of one number.
    np.testing.assert_allclose(got[-1], want[-1], rtol=0, atol=len(want) * 2.0**-22 * largest)


def test_noise_alone_with_eta_1_stays_finite() -> None:
    # In diffusers the root of 1 - alpha - deviation^2, which is 0, rounds to NaN on some processors.
    assert np.isfinite(run_ours(Case("ddim", ZERO_SNR, eta=1.0)).samples[-1]).all()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_begins_anew(name: str) -> None:
    scheduler = make_scheduler(SchedulerConfig.from_json(Case(name).json), 5, name)
    first, second = (denoise(scheduler, False, torch_draw()).samples[-1] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "lcm"])
def test_counts_that_arange_rounds_up_end_at_the_last_timestep(name: str) -> None:
    # 1000 / 61 goes 62 times into 1000 for arange: diffusers gives the model a timestep of -1.
    config = SchedulerConfig.from_json(Case(name, {"timestep_spacing": "trailing"}).json)
    timesteps = make_scheduler(config, 61, name).timesteps
    assert len(timesteps) == 61 + (name == "pndm")
    assert timesteps.min() >= 0


@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_setting_of_diffusers_is_read_or_refused(name: str) -> None:
    kind = SCHEDULERS[name]
    parameters = inspect.signature(getattr(diffusers, kind.class_name).__init__).parameters
    theirs = {key: p.default for key, p in parameters.items() if key != "self"}
    unread = UNREAD | (UNREAD_BY_LCM if name == "lcm" else set())
    assert theirs.keys() - kind.defaults.keys() <= unread
    # DPM++ reads these too where a file has them, though its class does not name them.
    more = {"sigma_min", "sigma_max"} if kind.class_name == "DPMSolverMultistepScheduler" else set()
    assert kind.defaults.keys() - theirs.keys() == more
    assert {key: theirs[key] for key in kind.defaults if key in theirs} == {
        key: value for key, value in kind.defaults.items() if key in theirs
    }


@pytest.mark.parametrize(("name", "value"), OWN_CLASSES.items())
def test_the_checkpoint_names_its_scheduler(name: str, value: dict[str, Any]) -> None:
    config = SchedulerConfig.from_json(value)
    assert find_scheduler(config) == name
    reference = getattr(diffusers, value["_class_name"]).from_config(value)
    reference.set_timesteps(20)
    np.testing.assert_array_equal(make_scheduler(config, 20).timesteps, reference.timesteps.numpy())


def test_a_class_that_is_not_there_needs_a_name() -> None:
    own = {"_class_name": "UniPCMultistepScheduler", "solver_type": "bh2", "solver_order": 2}
    config = SchedulerConfig.from_json(own)
    with pytest.raises(InputError, match="UniPCMultistepScheduler, which PlanForge does not have") as caught:
        make_scheduler(config, 20)
    assert caught.value.option == "scheduler"
    assert len(make_scheduler(config, 20, "dpm++2m").timesteps) == 20


REFUSED_VALUES = {
    "thresholding": True,
    "skip_prk_steps": False,
    "algorithm_type": "sde-dpmsolver++",
    "solver_order": 3,
    "solver_type": "heun",
    "timestep_type": "continuous",
    "variance_type": "learned",
    "use_exponential_sigmas": True,
    "use_beta_sigmas": True,
    "use_lu_lambdas": True,
    "use_flow_sigmas": True,
}


@pytest.mark.parametrize("key", FIXED)
def test_what_is_not_there_is_refused_by_name(key: str) -> None:
    readers = [name for name, kind in SCHEDULERS.items() if key in kind.defaults]
    assert readers
    for name in SCHEDULERS:
        config = SchedulerConfig.from_json(Case(name, {key: REFUSED_VALUES[key]}).json)
        if name in readers:
            refused = re.escape(f"has {key} {REFUSED_VALUES[key]!r}, but PlanForge's {name} has ")
            with pytest.raises(InputError, match=refused) as caught:
                make_scheduler(config, 20, name)
            assert caught.value.option == "scheduler"
        else:
            make_scheduler(config, 20, name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"beta_schedule": "sigmoid"},
            "scheduler.beta_schedule is 'sigmoid', not linear or scaled_linear or",
        ),
        ({"prediction_type": "flow"}, "prediction_type is 'flow', not epsilon or v_prediction or sample"),
        ({"timestep_spacing": "even"}, "timestep_spacing is 'even', not leading or trailing or linspace"),
        ({"interpolation_type": 3}, "interpolation_type must be str, but is 3"),
        ({"clip_sample": "no"}, "clip_sample must be true or false"),
        ({"num_train_timesteps": 10**9}, "num_train_timesteps is 1e.09; it must be from 2 to 100000"),
        ({"num_train_timesteps": 10.0}, "num_train_timesteps must be int"),
        ({"beta_end": 1.5}, "beta_end is 1.5; it must be from 1e-06 to 0.999"),
        ({"beta_start": float("nan")}, "beta_start is nan"),
        ({"trained_betas": [0.1, 1.0]}, "trained_betas is 1; it must be from"),
        ({"trained_betas": "0.1"}, "trained_betas must be list"),
        ({"_class_name": None}, "_class_name must be str"),
    ],
)
def test_values_that_no_scheduler_has_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        SchedulerConfig.from_json({**Case("ddim").json, **settings}, "scheduler_config.json")


@pytest.mark.parametrize(
    ("settings", "name", "options", "message"),
    [
        ({}, "heun", {}, "scheduler='heun' is not one of 'ddim'"),
        ({}, "dpm++2", {}, "did you mean 'dpm..2m'"),
        ({}, "ddim", {"steps": 0}, "steps=0 must be an integer from 1 to 1000"),
        ({}, "ddim", {"steps": 1000}, "begins at timestep 1000 .* steps_offset 1, .* is 999; take fewer"),
        ({}, "lcm", {"steps": 51}, "steps=51 must be an integer from 1 to 50 .LCM"),
        ({"original_inference_steps": 1001}, "lcm", {}, "original_inference_steps is 1001, of 1000"),
        ({"steps_offset": 0}, "dpm++2m", {"steps": 1000}, "does not fall from step to step with steps=1000"),
        ({**ZERO_SNR, **LINEAR, "beta_start": 0.012}, "euler_ancestral", {}, "does not fall from step"),
        ({"lambda_min_clipped": 9.0}, "dpm++2m", {}, "does not fall from step to step with steps=20"),
        ({}, "ddim", {"strength": 0.01}, "strength=0.01 of 20 steps leaves none"),
        ({}, "ddim", {"strength": 1.1}, "strength=1.1 must be a number from 0 to 1"),
        ({}, "euler", {"eta": 0.5}, "eta=0.5 is an option of ddim alone"),
        ({}, "ddim", {"eta": float("nan")}, "eta=nan must be"),
        (
            {"prediction_type": "sample"},
            "pndm",
            {},
            "'sample', but PlanForge's pndm has 'epsilon' or 'v_prediction' only",
        ),
        ({**ZERO_SNR, "prediction_type": "epsilon"}, "ddim", {}, "says nothing about the picture"),
        ({"trained_betas": [0.1, 0.2]}, "ddim", {}, "has 2 trained_betas for num_train_timesteps 1000"),
        (
            {"num_train_timesteps": 90000, "beta_end": 0.9},
            "ddim",
            {},
            "leave 0 of a picture after 90000 timesteps",
        ),
    ],
)
def test_calls_that_cannot_be_are_refused(
    settings: dict[str, Any], name: str, options: dict[str, Any], message: str
) -> None:
    config = SchedulerConfig.from_json(Case("ddim", settings).json)
    with pytest.raises(InputError, match=message):
        make_scheduler(config, **{"steps": 20, "name": name, **options})


def test_null_is_not_given() -> None:
    nulls = dict.fromkeys([*FIXED, *CHOICES, "trained_betas", "use_karras_sigmas", "beta_end"])
    assert SchedulerConfig.from_json({"_class_name": "DDIMScheduler", **nulls}).given == {}
