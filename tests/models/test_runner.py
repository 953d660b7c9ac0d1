"""The runner on a tiny random model: against dense arithmetic, and at its edges."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.check import perplexity, teacher_forced_logprobs, token_logprobs
from gpu_worker.inputs import PromptLogprobRequest, StepInputs
from gpu_worker.kv_cache import bytes_per_block
from gpu_worker.runner import ModelRunner, default_dtype
from kernels.kv_bytes import INT8_CACHE
from services.models.errors import ModelFileError
from tests.models.driver import Driver, Lane, sampling_batch, step_inputs
from tests.models.tiny import Tiny, reference_logits, write_directory, write_gguf


def load(path: Path, **changes: object) -> ModelRunner:
    settings: dict[str, object] = {
        "num_blocks": 40,
        "block_size": 4,
        "max_model_len": None,
        "progress": lambda fraction, text: None,
    }
    dtype = str(changes.pop("dtype", "float32"))
    return ModelRunner(path, dtype, **(settings | changes))  # type: ignore[arg-type]


def greedy(tiny: Tiny, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(tiny, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], list(range(20, 50)), [90, 1, 90]]


def penalised(tiny: Tiny, prompt: list[int], num_tokens: int, factors: list[float]) -> list[int]:
    """Greedy tokens with repetition, presence and frequency penalties, one by one."""
    repetition, presence, frequency = factors
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = reference_logits(tiny, tokens)[-1].astype(float)
        for token in set(tokens):
            logits[token] *= repetition if logits[token] <= 0 else 1 / repetition
            count = tokens[len(prompt) :].count(token)
            logits[token] -= presence * (count > 0) + frequency * count
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("operations", ["auto", "torch"])
def test_penalties_are_those_of_each_lane_whatever_the_batch_and_where_it_joined(
    tiny_gguf: Path, operations: str
) -> None:
    tiny = Tiny()
    runner = load(tiny_gguf, operations=operations)
    wanted = [[1.3, 0.0, 0.0], [1.0, 0.6, 0.0], [1.0, 0.0, 0.4], [1.0, 0.0, 0.0]]
    expected = [
        penalised(tiny, prompt, 12, factors)
        for prompt, factors in zip(PROMPTS, wanted, strict=True)
    ]
    assert expected[:3] != [greedy(tiny, prompt, 12) for prompt in PROMPTS[:3]]
    for known in (0, 5):
        # With 5 known tokens a lane joins as after a preemption, or at a new worker.
        lanes = [
            Lane(
                [*prompt, *answer[:known]],
                12 - known,
                factors=(factors[0], factors[1], factors[2]),
                num_prompt=len(prompt),
            )
            for prompt, answer, factors in zip(PROMPTS, expected, wanted, strict=True)
        ]
        Driver(runner, 3 if known else 64).run(lanes)
        assert [lane.generated for lane in lanes] == [answer[known:] for answer in expected]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("factors", [None, [1.0, 1.0, 4.0, 8.0]])
@pytest.mark.parametrize("budget", [3, 64])
def test_case_55_gguf_model_with_and_without_rope_factors_matches_dense_arithmetic(
    tmp_path: Path, tied: bool, factors: list[float] | None, budget: int
) -> None:
    tiny = Tiny(tied=tied, factors=factors)
    runner = load(write_gguf(tmp_path / "tiny.gguf", tiny))
    lanes = [Lane(list(prompt), 10) for prompt in PROMPTS]
    Driver(runner, budget).run(lanes)
    for prompt, lane in zip(PROMPTS, lanes, strict=True):
        assert lane.generated == greedy(tiny, prompt, 10)


def test_directory_and_gguf_give_the_same_numbers(tiny_directory: Path, tiny_gguf: Path) -> None:
    tokens = list(range(3, 40))
    assert token_logprobs(load(tiny_directory), tokens) == token_logprobs(load(tiny_gguf), tokens)


def test_llama3_scaling_of_a_directory(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    tiny = Tiny()
    runner = load(write_directory(tmp_path / "scaled", tiny, rope_scaling=scaling))
    factors = runner.config.rope_factors
    assert factors is not None and factors[0] == 1.0 and factors[-1] == 8.0
    tiny.factors = list(factors)
    tokens = list(range(3, 60))
    logits = torch.from_numpy(reference_logits(tiny, tokens))
    expected = torch.log_softmax(logits, -1)[range(56), tokens[1:]]
    assert token_logprobs(runner, tokens) == pytest.approx(expected.tolist(), abs=1e-4)


def test_bfloat16_stays_close(tiny_directory: Path) -> None:
    tokens = list(range(3, 40))
    exact = perplexity(load(tiny_directory), tokens, 64)
    assert perplexity(load(tiny_directory, dtype="bfloat16"), tokens, 64) == pytest.approx(
        exact, rel=0.02
    )


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("hidden, inner, heads", [(64, 128, 8), (64, 96, 4), (42, 75, 6)])
def test_int8_stays_close(tmp_path: Path, native: str, hidden: int, inner: int, heads: int) -> None:
    """With whole blocks of 64 features, and with sizes that end within one."""
    tiny = Tiny(hidden_size=hidden, intermediate_size=inner, num_heads=heads)
    path = write_directory(tmp_path / "tiny", tiny)
    tokens = list(range(3, 40))
    exact = perplexity(load(path), tokens, 64)
    runner = load(path, quantization="int8", native=native)
    assert perplexity(runner, tokens, 64) == pytest.approx(exact, rel=0.02)
    assert perplexity(runner, tokens, 64, chunk_tokens=5) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_kv_in_bytes_stays_close(tiny_directory: Path, native: str, kv_cache_dtype: str) -> None:
    tokens = list(range(3, 40))
    exact = perplexity(load(tiny_directory), tokens, 64)
    runner = load(tiny_directory, kv_cache_dtype=kv_cache_dtype, native=native)
    assert perplexity(runner, tokens, 64, chunk_tokens=5) == pytest.approx(exact, rel=0.02)
    with pytest.raises(ValueError, match="'int3' is not one of"):
        load(tiny_directory, kv_cache_dtype="int3")


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    ],
)
def test_batch_invariant_logits_are_the_same_in_any_batch(
    tmp_path: Path, options: dict[str, str]
) -> None:
    if options["dtype"] == "bfloat16" and default_dtype() != "bfloat16":
        pytest.skip("this processor has no native products of bfloat16")
    path = write_directory(tmp_path / "tiny", Tiny(intermediate_size=128, num_heads=8))
    runner = load(path, batch_invariant=True, **options)

    def run(prompts: list[list[int]], budget: int) -> list[Lane]:
        lanes = [Lane(list(prompt), 6, num_logprobs=3) for prompt in prompts]
        Driver(runner, budget).run(lanes)
        return lanes

    together = run(PROMPTS, 64)
    for prompt, lane in zip(PROMPTS, together, strict=True):
        for budget in (1, 7, 64):
            alone = run([prompt], budget)[0]
            assert alone.generated == lane.generated
            for ours, theirs in zip(alone.logprobs, lane.logprobs, strict=True):
                assert ours is not None and theirs is not None
                assert ours.chosen_logprob == theirs.chosen_logprob
                assert ours.values.tolist() == theirs.values.tolist()


def test_batch_invariant_is_refused_where_it_cannot_be_kept(tiny_directory: Path) -> None:
    with pytest.raises(ValueError, match="batch_invariant is not possible"):
        load(tiny_directory, batch_invariant=True, native="off")
    assert load(tiny_directory, batch_invariant=True, native="baseline").instruction_set
    with pytest.raises(ValueError, match="bfloat16 has no native products"):
        load(tiny_directory, dtype="bfloat16", batch_invariant=True, native="baseline")


def test_fp8_weights_stay_close_and_have_their_limits(tiny_directory: Path) -> None:
    tokens = list(range(3, 40))
    exact = perplexity(load(tiny_directory), tokens, 64)
    found = perplexity(load(tiny_directory, quantization="fp8"), tokens, 64)
    assert found == pytest.approx(exact, rel=0.05) and found != exact
    with pytest.raises(ValueError, match="not possible with fp8"):
        load(tiny_directory, quantization="fp8", batch_invariant=True)
    with pytest.raises(ValueError, match="a GPU has fp8"):
        load(tiny_directory, quantization="int8", operations="triton")


def test_a_quantization_that_there_is_not_is_refused(tiny_directory: Path) -> None:
    with pytest.raises(ValueError, match="'int3' is not one of"):
        load(tiny_directory, quantization="int3")


def test_perplexity_scores_all_tokens_but_the_first(tiny_directory: Path) -> None:
    runner = load(tiny_directory)
    logprobs = token_logprobs(runner, [1, 7, 8, 9])
    assert len(logprobs) == 3
    assert perplexity(runner, [1, 7, 8, 9, 10], 4) == pytest.approx(math.exp(-sum(logprobs) / 3))
    with pytest.raises(ValueError, match="two tokens"):
        perplexity(runner, [], 4)
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(runner, [5] * 200)


def test_prompt_logprobs_of_some_rows(tiny_directory: Path) -> None:
    runner = load(tiny_directory)
    tokens = [7, 8, 9, 10, 11]
    expected = torch.log_softmax(torch.from_numpy(reference_logits(Tiny(), tokens)), -1)
    inputs = one_sequence(tokens, PromptLogprobRequest(1, 3, np.array([9, 10, 11], np.int32), 2))
    outputs = runner.execute(inputs)
    rows = outputs.prompt_logprobs[0]
    assert len(rows) == 3
    for offset, entry in enumerate(rows):
        assert entry is not None
        row = expected[1 + offset]
        assert entry.chosen_logprob == pytest.approx(float(row[tokens[2 + offset]]), abs=1e-4)
        assert entry.ids.tolist() == row.topk(2).indices.tolist()
        assert entry.values.tolist() == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def one_sequence(tokens: list[int], *requests: PromptLogprobRequest) -> StepInputs:
    lane = Lane(list(tokens), 1, blocks=[3, 1])
    inputs = step_inputs([(lane, len(tokens))], [(0, lane)], 4)
    return StepInputs(
        input_ids=inputs.input_ids,
        positions=inputs.positions,
        slot_mapping=inputs.slot_mapping,
        cu_seqlens_q=inputs.cu_seqlens_q,
        seqlens_k=inputs.seqlens_k,
        block_table=inputs.block_table,
        num_decodes=0,
        logits_rows=inputs.logits_rows,
        sampling=inputs.sampling,
        prompt_logprobs=requests,
    )


def test_an_empty_step_is_nothing(tiny_directory: Path) -> None:
    nothing = np.zeros(0, dtype=np.int32)
    outputs = load(tiny_directory).execute(
        StepInputs(
            input_ids=nothing,
            positions=nothing,
            slot_mapping=nothing.astype(np.int64),
            cu_seqlens_q=np.zeros(1, dtype=np.int32),
            seqlens_k=nothing,
            block_table=np.zeros((0, 1), dtype=np.int32),
            num_decodes=0,
            logits_rows=nothing,
            sampling=sampling_batch([]),
        )
    )
    assert len(outputs.token_ids) == len(outputs.finite) == len(outputs.logprobs) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_sick_sequence_is_marked_and_harms_no_other(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    runner = load(tiny_directory)
    healthy = runner._model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = healthy(hidden)
        logits[1:, 3] = bad
        return logits

    monkeypatch.setattr(runner._model, "logits", poisoned)
    lanes = [
        Lane([4, 5, 6], 1, num_logprobs=1, blocks=[2]),
        Lane([4, 95], 1, temperature=0.8, num_logprobs=1, blocks=[5]),
    ]
    pairs = [(lane, len(lane.tokens)) for lane in lanes]
    outputs = runner.execute(step_inputs(pairs, list(enumerate(lanes)), 4))
    assert outputs.finite.tolist() == [True, False]
    assert outputs.token_ids[1] == 0
    assert outputs.logprobs[0] is not None and outputs.logprobs[1] is None
    alone = runner.execute(step_inputs(pairs[:1], [(0, lanes[0])], 4))
    assert alone.token_ids[0] == outputs.token_ids[0]


def test_warm_up_leaves_the_pool_as_it_was(tiny_directory: Path) -> None:
    runner = load(tiny_directory)
    tokens = list(range(3, 40))
    before = token_logprobs(runner, tokens)
    runner.warm_up()
    keys, values = runner._cache.layer(0)
    assert not keys[0].any() and not values[0].any()
    assert token_logprobs(runner, tokens) == before


def test_settings_that_do_not_fit_are_refused(tiny_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        load(tiny_directory, max_model_len=129)
    with pytest.raises(ValueError, match="dtype"):
        load(tiny_directory, dtype="float8")
    with pytest.raises(ValueError, match="blocks"):
        load(tiny_directory, num_blocks=1)
    with pytest.raises(ModelFileError, match="does not exist"):
        load(tmp_path / "absent.gguf")
    assert default_dtype() in ("float32", "bfloat16")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path, bad: float) -> None:
    tiny = Tiny()
    tiny.weights["model.layers.1.mlp.up_proj.weight"][3, 4] = bad
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.up_proj"):
        load(write_directory(tmp_path / "broken", tiny))


def test_a_weight_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    tiny = Tiny()
    tiny.weights["model.norm.weight"] = np.ones(3, dtype=np.float32)
    with pytest.raises(ModelFileError, match="shape"):
        load(write_directory(tmp_path / "broken", tiny))


def test_progress_rises_to_one(tiny_directory: Path) -> None:
    seen: list[float] = []
    load(tiny_directory, progress=lambda fraction, text: seen.append(fraction))
    assert seen == sorted(seen) and seen[-1] == 1.0


def test_block_arithmetic(tiny_directory: Path) -> None:
    config = load(tiny_directory).config
    # 2 (k and v) x 2 layers x 16 slots x 2 heads x 8 dims x 4 bytes
    assert bytes_per_block(config, 16, torch.float32) == 4096
    # In bytes, with 4 more for a scale.
    assert bytes_per_block(config, 16, INT8_CACHE) == 2 * 2 * 16 * 2 * 12


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"cases": []}',
        '{"cases": [{"name": "a", "prompt_token_ids": [], "greedy_token_ids": [1]}]}',
        '{"cases": [{"name": "a", "prompt_token_ids": [1], "greedy_token_ids": ["x"]}]}',
        (
            '{"cases": [{"name": "a", "prompt_token_ids": [1], "greedy_token_ids": [1],'
            ' "logprobs": []}]}'
        ),
    ],
)
def test_a_malformed_reference_is_refused(
    tiny_directory: Path, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "reference.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"reference\.json"):
        teacher_forced_logprobs(load(tiny_directory), path)


def test_a_reference_without_logprobs(tiny_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    case = {"name": "a", "prompt_token_ids": [7, 8], "greedy_token_ids": [9, 10]}
    path.write_text(json.dumps({"cases": [case]}), encoding="utf-8")
    runner = load(tiny_directory)
    result = teacher_forced_logprobs(runner, path)
    expected = token_logprobs(runner, [7, 8, 9, 10])[1:]
    assert result["mean_logprob"] == pytest.approx(sum(expected) / 2)
    assert result["num_tokens"] == 2
    assert result["reference_mean_logprob"] is None and result["max_abs_difference"] is None


def test_without_a_compiler_torch_runs_and_says_so_once(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.native.build.COMPILERS", ())
    runner = load(tiny_directory, native_cache=tmp_path / "native")
    assert runner.instruction_set == ""
    assert len(runner.notices) == 1 and "no C compiler" in runner.notices[0]
    assert load(tiny_directory, native="off").notices == ()


def test_native_and_torch_kernels_agree(tiny_directory: Path) -> None:
    native, reference = load(tiny_directory), load(tiny_directory, native="off")
    if not native.instruction_set:
        pytest.skip(native.notices[0])
    tokens = list(range(3, 60))
    assert token_logprobs(native, tokens) == pytest.approx(
        token_logprobs(reference, tokens), abs=1e-5
    )
    with pytest.raises(ValueError, match="instruction set"):
        load(tiny_directory, native="sse9")
