"""Faults that show only in some batches, rows or positions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .faults import Plant, constant, node_of

LATE, EARLY = 100, 199  # positions


def put_before(model: ir.Model, target: ir.Node, *nodes: ir.Node) -> None:
    """Insert nodes, named, before another one."""
    for number, node in enumerate(nodes):
        for value in node.outputs:
            value.name = value.name or f"{target.name}_planted_{number}"
    model.graph.insert_before(target, list(nodes))


def is_single_step(model: ir.Model) -> list[ir.Node]:
    """Nodes whose last result says whether the step has one token, as a tensor of no axes."""
    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    width = ir.node("Shape", [ids], {"start": 1, "end": 2})
    return [width, ir.node("Equal", [width.outputs[0], constant(model, "one_token", np.array([1]))])]


def late_slot(model: ir.Model) -> None:
    """Keys of layer 0 go one slot too far in single steps at positions 100 to 199."""
    scatter = node_of(model, "h.0.attn", "TensorScatter")
    places = scatter.inputs[2]
    nodes = is_single_step(model)
    at_least = ir.node("GreaterOrEqual", [places, constant(model, "late", np.array(LATE))])
    at_most = ir.node("LessOrEqual", [places, constant(model, "early", np.array(EARLY))])
    inside = ir.node("And", [at_least.outputs[0], at_most.outputs[0]])
    both = ir.node("And", [inside.outputs[0], nodes[-1].outputs[0]])
    further = ir.node("Cast", [both.outputs[0]], {"to": int(ir.DataType.INT64)})
    moved = ir.node("Add", [places, further.outputs[0]])
    put_before(model, scatter, *nodes, at_least, at_most, inside, both, further, moved)
    scatter.replace_input_with(2, moved.outputs[0])


def late_total_at(module: str, first: int, last: int) -> Plant:
    """Where the kernel places keys by the rows' lengths: each counts one token more in these single steps."""

    def plant(model: ir.Model) -> None:
        attention = node_of(model, module, "GroupQueryAttention")
        lengths = attention.inputs[5]
        nodes = is_single_step(model)
        at_least = ir.node("GreaterOrEqual", [lengths, constant(model, "late", np.array(first, np.int32))])
        at_most = ir.node("LessOrEqual", [lengths, constant(model, "early", np.array(last, np.int32))])
        inside = ir.node("And", [at_least.outputs[0], at_most.outputs[0]])
        both = ir.node("And", [inside.outputs[0], nodes[-1].outputs[0]])
        further = ir.node("Cast", [both.outputs[0]], {"to": int(ir.DataType.INT32)})
        moved = ir.node("Add", [lengths, further.outputs[0]])
        put_before(model, attention, *nodes, at_least, at_most, inside, both, further, moved)
        attention.replace_input_with(5, moved.outputs[0])

    return plant


late_total = late_total_at("h.0.attn", LATE, EARLY)  # as `late_slot`


def exchanged_sources(count: int) -> Plant:
    """In layer 0 the first two rows attend to each other's source, where there are so many sources."""

    def plant(model: ir.Model) -> None:
        inputs = {value.name: value for value in model.graph.inputs}
        values = inputs["cross.0.value"]
        users = list(values.uses())
        zero, one, two, many = (
            constant(model, f"count_{number}", np.array(number)) for number in (0, 1, 2, count)
        )
        size = ir.node("Shape", [values], {"start": 0, "end": 1})
        flat = ir.node("Squeeze", [size.outputs[0]])
        places = ir.node("Range", [zero, flat.outputs[0], one])
        is_many = ir.node("Equal", [flat.outputs[0], many])
        is_early = ir.node("Less", [places.outputs[0], two])
        moved = ir.node("And", [is_many.outputs[0], is_early.outputs[0]])
        other = ir.node("Sub", [one, places.outputs[0]])
        chosen = ir.node("Where", [moved.outputs[0], other.outputs[0], places.outputs[0]])
        gathered = ir.node("Gather", [values, chosen.outputs[0]], {"axis": 0})
        nodes = (size, flat, places, is_many, is_early, moved, other, chosen, gathered)
        put_before(model, users[0][0], *nodes)
        for user, index in users:
            user.replace_input_with(index, gathered.outputs[0])

    return plant


def positions_of_four(model: ir.Model) -> None:
    """Positions are one too small in batches of 4."""
    gather = node_of(model, "wpe", "Gather")
    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    rows = ir.node("Shape", [ids], {"start": 0, "end": 1})
    four = ir.node("Equal", [rows.outputs[0], constant(model, "four", np.array([4]))])
    less = ir.node("Cast", [four.outputs[0]], {"to": int(ir.DataType.INT64)})
    late = ir.node("Sub", [gather.inputs[1], less.outputs[0]])
    floor = ir.node("Max", [late.outputs[0], constant(model, "no_position", np.array(0))])
    put_before(model, gather, rows, four, less, late, floor)
    gather.replace_input_with(1, floor.outputs[0])


def late_positions_behind(min_past: int, rows: int | None, widths: range) -> Plant:
    """Positions are one too small in steps of some widths, of so many rows, behind so many tokens or more."""

    def plant(model: ir.Model) -> None:
        gather = node_of(model, "wpe", "Gather")
        inputs = {value.name: value for value in model.graph.inputs}
        sizes = {
            "rows": ir.node("Shape", [inputs["input_ids"]], {"start": 0, "end": 1}),
            "width": ir.node("Shape", [inputs["input_ids"]], {"start": 1, "end": 2}),
            "past": ir.node("Shape", [inputs["past_key_values.0.key"]], {"start": 2, "end": 3}),
        }
        bounds = [
            ("width", "GreaterOrEqual", widths.start),
            ("width", "Less", widths.stop),
            ("past", "GreaterOrEqual", min_past),
        ]
        if rows is not None:
            bounds.append(("rows", "Equal", rows))
        nodes = list(sizes.values())
        holds = None
        for number, (size, operator, bound) in enumerate(bounds):
            limit = constant(model, f"bound_{number}", np.array([bound]))
            nodes.append(ir.node(operator, [sizes[size].outputs[0], limit]))
            if holds is not None:
                nodes.append(ir.node("And", [holds, nodes[-1].outputs[0]]))
            holds = nodes[-1].outputs[0]
        assert holds is not None
        less = ir.node("Cast", [holds], {"to": int(ir.DataType.INT64)})
        late = ir.node("Sub", [gather.inputs[1], less.outputs[0]])
        floor = ir.node("Max", [late.outputs[0], constant(model, "first_position", np.array(0))])
        put_before(model, gather, *nodes, less, late, floor)
        gather.replace_input_with(1, floor.outputs[0])

    return plant


def early_positions(module: str) -> Plant:
    """Positions are one too small in batches of several rows."""

    def plant(model: ir.Model) -> None:
        gather = node_of(model, module, "Gather")
        ids = next(value for value in model.graph.inputs if value.name == "input_ids")
        rows = ir.node("Shape", [ids], {"start": 0, "end": 1})
        many = ir.node("Greater", [rows.outputs[0], constant(model, "one_row", np.array([1]))])
        less = ir.node("Cast", [many.outputs[0]], {"to": int(ir.DataType.INT64)})
        late = ir.node("Sub", [gather.inputs[1], less.outputs[0]])
        floor = ir.node("Max", [late.outputs[0], constant(model, "no_position", np.array(0))])
        put_before(model, gather, rows, many, less, late, floor)
        gather.replace_input_with(1, floor.outputs[0])

    return plant


def give_all_rows(model: ir.Model, lengths: ir.Value, node: ir.Node, choice: ir.Node) -> ir.Value:
    """Put nodes before another that give each row the length that is chosen of all; return their result."""
    count = ir.node("Shape", [lengths])
    wide = ir.node("Expand", [choice.outputs[0], count.outputs[0]])
    for value in (choice.outputs[0], wide.outputs[0]):
        value.type = ir.TensorType(ir.DataType.INT32)
    put_before(model, node, choice, count, wide)
    return wide.outputs[0]


def length_of_the_first_row(model: ir.Model) -> None:
    """Each row's past is as long as the first one's."""
    lengths = next(value for value in model.graph.inputs if value.name == "past_lengths")
    users = list(lengths.uses())
    first = ir.node("Gather", [lengths, constant(model, "first_row", np.array([0]))])
    wide = give_all_rows(model, lengths, users[0][0], first)
    for user, index in users:
        user.replace_input_with(index, wide)


def length_of_the_longest_row(model: ir.Model) -> None:
    """Each row's past is as long as the longest."""
    lengths = next(value for value in model.graph.inputs if value.name == "past_lengths")
    users = list(lengths.uses())
    longest = ir.node("ReduceMax", [lengths], {"keepdims": 1})
    wide = give_all_rows(model, lengths, users[0][0], longest)
    for user, index in users:
        user.replace_input_with(index, wide)


def seen_as_far_as_the_longest_row(model: ir.Model) -> None:
    """In layer 0 each row sees as many slots as the longest."""
    attention = node_of(model, "h.0.attn", "GroupQueryAttention")
    lengths = attention.inputs[5]
    assert lengths is not None
    longest = ir.node("ReduceMax", [lengths], {"keepdims": 1})
    attention.replace_input_with(5, give_all_rows(model, lengths, attention, longest))


def unmasked(axis: int, first: int, last: int, name: str = "attention_mask") -> Plant:
    """The padding of some rows (axis 0), or at some columns (axis 1), is not masked."""

    def plant(model: ir.Model) -> None:
        mask = next(value for value in model.graph.inputs if value.name == name)
        cast = next(node for node, _ in mask.uses() if node.op_type == "Cast")
        users = list(cast.outputs[0].uses())
        size = ir.node("Shape", [mask], {"start": axis, "end": axis + 1})
        flat = ir.node("Squeeze", [size.outputs[0]])
        zero, one = (constant(model, f"number_{n}", np.array(n)) for n in (0, 1))
        places = ir.node("Range", [zero, flat.outputs[0], one])
        after = ir.node(
            "GreaterOrEqual", [places.outputs[0], constant(model, "first_place", np.array(first))]
        )
        before = ir.node("LessOrEqual", [places.outputs[0], constant(model, "last_place", np.array(last))])
        chosen = ir.node("And", [after.outputs[0], before.outputs[0]])
        wide = ir.node("Unsqueeze", [chosen.outputs[0], constant(model, "other_axis", np.array([1 - axis]))])
        seen = ir.node("Or", [cast.outputs[0], wide.outputs[0]])
        nodes = (size, flat, places, after, before, chosen, wide, seen)
        put_before(model, users[0][0], *nodes)
        for user, index in users:
            user.replace_input_with(index, seen.outputs[0])

    return plant
