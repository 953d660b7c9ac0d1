"""The runner with the operations of a GPU, on the CPU in Triton's interpreter: staging, padding and
feedback are the same code there, captures apart.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from gpu_worker.blank_steps import blank_decodes
from gpu_worker.executor import EngineShape, Executor
from gpu_worker.graphs import graph_sizes, is_all_decodes, pad_decodes
from gpu_worker.inputs import StepInputs
from gpu_worker.runner import ModelRunner
from services.models.config import ModelConfig
from tests.models.driver import Driver, Lane, step_inputs
from tests.models.tiny import Tiny, reference_logits, write_directory
from tests.unit.gpu_worker.plans import join, plan

BLOCK_SIZE = 16
PROMPTS = [[5], list(range(20, 40))]


def load(path: Path, operations: str = "triton", **changes: bool) -> ModelRunner:
    return ModelRunner(
        path,
        "float32",
        num_blocks=12,
        block_size=BLOCK_SIZE,
        max_model_len=64,
        progress=lambda fraction, text: None,
        native="off",
        operations=operations,
        max_num_seqs=3,
        **changes,
    )


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny(num_layers=1, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    return write_directory(tmp_path_factory.mktemp("triton") / "tiny", tiny)


@pytest.fixture(scope="module")
def warm(path: Path) -> ModelRunner:
    """One size, so that every decode step is padded."""
    runner = load(path)
    assert runner._steps._graphs is not None
    runner._steps._graphs._sizes = (3,)
    runner._steps.capture(blank_decodes)
    return runner


def lanes() -> list[Lane]:
    wanted = zip(PROMPTS, (0.0, 0.9), (3, 1), strict=True)
    return [Lane(list(prompt), n, heat, seed=3, num_logprobs=2) for prompt, heat, n in wanted]


def test_padded_decodes_and_chunks_give_the_tokens_of_the_oracle(
    path: Path, warm: ModelRunner, tiny: Tiny
) -> None:
    ours, unpadded, oracle = lanes(), lanes(), lanes()
    Driver(warm, 16).run(ours)
    Driver(load(path), 16).run(unpadded)
    Driver(load(path, "torch"), 16).run(oracle)
    for mine, alone, reference in zip(ours, unpadded, oracle, strict=True):
        assert mine.generated == alone.generated == reference.generated
        for entry, expected in zip(mine.logprobs, reference.logprobs, strict=True):
            assert entry is not None and expected is not None
            assert entry.chosen_logprob == pytest.approx(expected.chosen_logprob, abs=1e-4)
            assert entry.ids.tolist() == expected.ids.tolist()
    first = reference_logits(tiny, PROMPTS[0])[-1]
    assert ours[0].generated[0] == int(first.argmax())


def decode(lane: Lane, runner: ModelRunner, **changes: object) -> StepInputs:
    """The next token of one lane, which keeps it as lane 2 does."""
    inputs = step_inputs([(lane, 1)], [(0, lane)], runner.block_size)
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


def test_a_step_is_queued_before_the_host_has_the_token_of_the_one_before(
    path: Path, warm: ModelRunner
) -> None:
    alone = Lane([7, 8, 9], 3)
    Driver(load(path, "torch"), 64).run([alone])
    lane, mine = Lane([7, 8, 9], 3, blocks=[5]), np.array([2], dtype=np.int32)
    prompt = step_inputs([(lane, 3)], [(0, lane)], warm.block_size)
    pending = [warm.submit(dataclasses.replace(prompt, output_lanes=mine))]
    for _ in range(2):
        lane.num_computed = len(lane.tokens)
        # What the host would have to know, it does not.
        lane.tokens.append(-7)
        pending.append(warm.submit(decode(lane, warm, input_lanes=mine, output_lanes=mine)))
    tokens = [int(warm.collect(step).token_ids[0]) for step in pending]
    assert tokens == alone.generated


def test_an_executor_a_step_ahead_gives_the_results_of_the_oracle(
    path: Path, warm: ModelRunner
) -> None:
    """Padded decodes, a chunk beside a decode, and a lane that is joined anew while its last step
    is on its way.
    """
    plans = [
        plan(1, reset=True, joins=[join(0, [20, 21], [3])], chunks={0: 2}),
        plan(2, joins=[join(1, [5, 6], [7])], chunks={1: 2}),
        plan(3),
        plan(4, leave=[1], joins=[join(1, [9, 8], [2])], chunks={1: 2}),
        plan(5, leave=[0]),
    ]
    shape = EngineShape(3, 64, BLOCK_SIZE, 12, warm.config.vocab_size)
    plain, ahead = Executor(load(path, "torch"), 1, shape), Executor(warm, 1, shape, warm)
    expected = [plain.run(each) for each in plans]
    results, begun = [], [ahead.begin(plans[0])]
    for each in plans[1:]:
        assert ahead.can_begin(each)
        begun.append(ahead.begin(each))
        results.append(ahead.finish(begun.pop(0)))
    assert [*results, ahead.finish(begun[0])] == expected
    assert not warm.computes_ahead, "a processor computes when it is asked"


def test_padding_reads_nothing_and_writes_nowhere(warm: ModelRunner) -> None:
    lane = Lane([71, 72], 1, num_computed=1, blocks=[3])
    inputs = decode(lane, warm, output_lanes=np.array([1], dtype=np.int32))
    padded = pad_decodes(inputs, 3, no_lane=3)
    assert padded.slot_mapping.tolist() == [inputs.slot_mapping[0], -1, -1]
    assert padded.seqlens_k.tolist() == [2, 0, 0] and padded.num_decodes == 3
    assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert padded.logits_rows.tolist() == [0, 1, 2]
    assert padded.output_lanes is not None and padded.output_lanes.tolist() == [1, 3, 3]
    assert padded.sampling.temperature.tolist() == [0, 0, 0]
    assert pad_decodes(inputs, 1, no_lane=3) is inputs
    pool = [tensor.clone() for tensor in warm._cache.tensors]
    warm.execute(inputs)
    for before, after in zip(pool, warm._cache.tensors, strict=True):
        changed = (before != after).any(dim=-1).any(dim=1).nonzero().tolist()
        assert changed == [[3, 1]]


def test_a_row_that_is_not_finite_is_marked_beside_padding(
    warm: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = warm._model.logits

    def poisoned(hidden):  # type: ignore[no-untyped-def]
        logits = healthy(hidden)
        logits[1, 3] = float("nan")
        return logits

    monkeypatch.setattr(warm._model, "logits", poisoned)
    pair = [Lane([7, 8], 1, num_computed=1, blocks=[3]), Lane([9, 8], 1, 0.9, blocks=[4])]
    pair[1].num_computed = 1
    inputs = step_inputs([(lane, 1) for lane in pair], list(enumerate(pair)), BLOCK_SIZE)
    outputs = warm.execute(inputs)
    assert outputs.finite.tolist() == [True, False] and outputs.token_ids[1] == 0


def test_batch_invariant_logits_are_the_same_as_a_decode_and_in_a_chunk(path: Path) -> None:
    runner = load(path, batch_invariant=True)
    lane = Lane([7, 8, 9], 2, num_logprobs=2)
    Driver(runner, 64).run([lane])
    again = Lane(lane.tokens[:-1], 1, num_logprobs=2)
    other = Lane([5], 1, num_logprobs=2)
    Driver(runner, 64).run([other, again])
    assert again.generated == lane.generated[1:]
    first, second = lane.logprobs[1], again.logprobs[0]
    assert first is not None and second is not None
    assert first.chosen_logprob == second.chosen_logprob
    assert first.values.tolist() == second.values.tolist()


def test_graph_sizes_are_few_and_end_at_the_lanes() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(10) == (1, 2, 4, 8, 10)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert graph_sizes(5000)[-1] == 512 and len(graph_sizes(5000)) == 19


def test_chunks_and_scored_prompts_have_no_graph(warm: ModelRunner) -> None:
    lane = Lane([7, 8, 9], 1, blocks=[3])
    assert not is_all_decodes(step_inputs([(lane, 3)], [(0, lane)], BLOCK_SIZE))
    assert not is_all_decodes(step_inputs([(lane, 1)], [], BLOCK_SIZE))
    lane.num_computed = 2
    assert is_all_decodes(step_inputs([(lane, 1)], [(0, lane)], BLOCK_SIZE))


def test_devices_are_named(path: Path) -> None:
    for name in ("gpu", "cpu:0", "cuda:x", "cuda:99"):
        with pytest.raises(ValueError, match="device"):
            ModelRunner(
                path,
                "float32",
                num_blocks=4,
                block_size=16,
                max_model_len=None,
                progress=lambda fraction, text: None,
                device=name,
            )
    assert isinstance(load(path).config, ModelConfig)
