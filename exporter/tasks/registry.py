"""Lists the tasks: a new one is a row here, with its two files, and its own half in runtime/apps/check."""

from __future__ import annotations

from ..levels import CALIBRATION
from ..task_traits import ENCODING, GENERATION, LIKENESS, PICTURES, TRANSLATION
from . import (
    decoder,
    decoder_answers,
    encoder,
    encoder_answers,
    image_answers,
    image_text,
    image_text_answers,
    images,
    translator,
    translator_answers,
)
from .base import Task
from .translator_search import follow, measure_found_gaps

TASKS = {
    GENERATION.name: Task(
        choose=decoder.choose,
        open_reference=decoder_answers.open_reference,
        complete=decoder_answers.continue_texts,
        answer_texts=decoder_answers.answer_texts,
        answer_again=decoder_answers.answer_again,
        calibrate=decoder_answers.calibrate,
        read_row=decoder_answers.read_row,
        open=decoder_answers.open_engine,
        list_measures=lambda case_set: (decoder.LOGITS, decoder.PASSAGES, decoder.COLUMNS),
        kept=decoder_answers.KEPT_LOGITS,
        count_kept=decoder_answers.count_kept,
        thin=decoder_answers.thin,
        choose_for_gaps=decoder_answers.choose_for_gaps,
        mean_over=(None,),
        calibrates_by=CALIBRATION,  # that of others reads what is random, too
    ),
    ENCODING.name: Task(
        choose=encoder.choose,
        open_reference=encoder_answers.open_reference,
        answer_texts=encoder_answers.answer_texts,
        calibrate=encoder_answers.calibrate,
        read_row=encoder_answers.read_row,
        open=encoder_answers.open_engine,
        list_measures=lambda case_set: case_set.cases[0].measures,  # those of real text
        kept=encoder_answers.KEPT_POSITIONS,
        count_kept=lambda case_set, output, text, counts: counts[0],
        mean_over=(None, *encoder_answers.KEPT_POSITIONS[0]),
        rounds_rows=True,
    ),
    TRANSLATION.name: Task(
        choose=translator.choose,
        open_reference=translator_answers.open_reference,
        complete=translator_answers.complete,
        answer_texts=translator_answers.answer_texts,
        calibrate=translator_answers.calibrate,
        read_row=translator_answers.read_row,
        open=translator_answers.open_engine,
        list_measures=lambda case_set: translator.MEASURES,
        kept=translator_answers.KEPT,
        count_kept=translator_answers.count_kept,
        choose_for_gaps=translator_answers.choose_for_gaps,
        limit_others=translator_answers.limit_scores,
        follow=follow,
        measure_found=measure_found_gaps,
    ),
    PICTURES.name: Task(
        choose=images.choose,
        open_reference=image_answers.open_reference,
        answer_texts=image_answers.answer_texts,
        calibrate=image_answers.calibrate,
        read_row=image_answers.read_row,
        open=image_answers.open_engine,
        list_measures=lambda case_set: images.MEASURES,
        kept=images.KEPT_STEPS,
        count_kept=images.count_kept,
    ),
    LIKENESS.name: Task(
        choose=image_text.choose,
        open_reference=image_text_answers.open_reference,
        answer_texts=image_text_answers.answer_texts,
        calibrate=image_text_answers.calibrate,
        read_row=image_text_answers.read_row,
        open=image_text_answers.open_engine,
        list_measures=lambda case_set: (image_text.TEXT, image_text.IMAGE),
        kept=image_text.KEPT,
        count_kept=lambda case_set, output, text, counts: counts[0],
    ),
}
