"""The runner under continuous batching, in this process and without a bus, and `transformers` on
the same requests.

The loop knows beforehand how long each answer is, so it needs no token to plan: it queues step
n + 1 while step n runs, and the tokens are fed on the device.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from random_weights import RandomWeights, num_parameters
from report import Report
from speed import Ceilings

from gpu_worker.inputs import Int32s, SamplingBatch, StepInputs
from gpu_worker.runner import ModelRunner, Submitted
from services.models.config import ModelConfig

BLOCK_SIZE = 16
NEEDED_S = {"small": 20, "1B": 40, "8B": 60}
PEER_NEEDED_S = {"1B": 45, "8B": 75}


@dataclass(eq=False)
class Sequence:
    """A prompt, and how many tokens are wanted after it."""

    prompt: Int32s
    num_wanted: int
    blocks: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.prompt) + self.num_wanted) // BLOCK_SIZE)


class Loop:
    """Decodes first, then chunks, within a budget of tokens; a step ahead where `ahead` is 1.

    Arrays by lane, as the worker has them: token ids, how many the host knows, how many there are
    (sampled ones on their way counted), how many are computed, and the block table.
    """

    def __init__(self, runner: ModelRunner, num_lanes: int, budget: int, ahead: int = 1) -> None:
        self._runner = runner
        self._budget = budget
        self._ahead = ahead
        self._owners: list[Sequence | None] = [None] * num_lanes
        self._free = list(range(1, runner.num_blocks))
        random.Random(0).shuffle(self._free)
        self._ids = np.zeros((num_lanes, runner.max_model_len), dtype=np.int32)
        width = -(-runner.max_model_len // BLOCK_SIZE)
        self._table = np.zeros((num_lanes, width), dtype=np.int32)
        self._known, self._length, self._computed = np.zeros((3, num_lanes), dtype=np.int32)
        self._pending: deque[tuple[Submitted, list[tuple[int, Sequence]]]] = deque()
        self.num_steps = 0

    def run(self, sequences: list[Sequence], skip_prompts: bool = False) -> None:
        """Until all are answered. skip_prompts: their KV is taken for computed, whatever it is."""
        waiting = deque(sequences)
        while waiting or any(self._owners):
            while waiting and None in self._owners and waiting[0].num_blocks <= len(self._free):
                self._join(waiting.popleft(), skip_prompts)
            self._step()
        while self._pending:
            self._collect()

    def _join(self, sequence: Sequence, skip_prompts: bool) -> None:
        lane, length = self._owners.index(None), len(sequence.prompt)
        sequence.blocks = [self._free.pop() for _ in range(sequence.num_blocks)]
        self._owners[lane] = sequence
        self._ids[lane, :length] = sequence.prompt
        self._table[lane, : len(sequence.blocks)] = sequence.blocks
        self._known[lane] = self._length[lane] = length
        self._computed[lane] = length - 1 if skip_prompts else 0

    def _step(self) -> None:
        lanes, counts, num_decodes = self._plan()
        ends = self._computed[lanes] + counts == self._length[lanes]
        inputs = self._inputs(lanes, counts, num_decodes, ends)
        sampled = [(int(lane), self._owners[lane]) for lane in lanes[ends]]
        self._pending.append((self._runner.submit(inputs), sampled))
        self.num_steps += 1
        self._computed[lanes] += counts
        self._length[lanes[ends]] += 1
        while len(self._pending) > self._ahead:
            self._collect()
        for lane, sequence in sampled:
            if self._length[lane] == len(sequence.prompt) + sequence.num_wanted:
                # A step in flight still reads these blocks; the next one is queued behind it.
                self._free.extend(sequence.blocks)
                self._owners[lane] = None

    def _plan(self) -> tuple[npt.NDArray[np.intp], Int32s, int]:
        """(lanes, tokens of each, how many of them decode), decodes first."""
        taken = np.flatnonzero([owner is not None for owner in self._owners])
        behind = self._length[taken] - self._computed[taken]
        order = np.argsort(behind != 1, kind="stable")
        lanes, behind = taken[order], behind[order]
        before = np.concatenate(([0], np.cumsum(behind)[:-1]))
        counts = np.clip(self._budget - before, 0, behind).astype(np.int32)
        kept = counts > 0
        return lanes[kept], counts[kept], int((behind[kept] == 1).sum())

    def _collect(self) -> None:
        submitted, sampled = self._pending.popleft()
        outputs = self._runner.collect(submitted)
        assert bool(outputs.finite.all()), "a model of random weights has finite logits"
        for (lane, sequence), token in zip(sampled, outputs.token_ids.tolist(), strict=True):
            sequence.generated.append(token)
            if self._owners[lane] is sequence:
                self._ids[lane, self._known[lane]] = token
                self._known[lane] += 1

    def _inputs(
        self,
        lanes: npt.NDArray[np.intp],
        counts: Int32s,
        num_decodes: int,
        ends: npt.NDArray[np.bool_],
    ) -> StepInputs:
        cu_seqlens_q = np.zeros(len(lanes) + 1, dtype=np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        row = np.repeat(np.arange(len(lanes)), counts)
        lane = lanes[row]
        within = np.arange(cu_seqlens_q[-1], dtype=np.int32) - cu_seqlens_q[row]
        positions = self._computed[lane] + within
        fed = positions >= self._known[lane]
        blocks = self._table[lane, positions // BLOCK_SIZE].astype(np.int64)
        seqlens_k = self._computed[lanes] + counts
        width = -(-int(seqlens_k.max()) // BLOCK_SIZE)
        return StepInputs(
            input_ids=np.where(fed, 0, self._ids[lane, positions]),
            positions=positions,
            slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            block_table=self._table[lanes, :width],
            num_decodes=num_decodes,
            logits_rows=cu_seqlens_q[1:][ends] - 1,
            sampling=greedy(int(ends.sum())),
            input_lanes=np.where(fed, lane, -1).astype(np.int32),
            output_lanes=lanes[ends].astype(np.int32),
        )


def greedy(num_rows: int) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.zeros(num_rows, dtype=np.float32),
        top_p=np.ones(num_rows, dtype=np.float32),
        top_k=np.zeros(num_rows, dtype=np.int32),
        min_p=np.zeros(num_rows, dtype=np.float32),
        seed=np.zeros(num_rows, dtype=np.uint64),
        position=np.zeros(num_rows, dtype=np.int64),
        num_logprobs=np.full(num_rows, -1, dtype=np.int32),
    )


def load(
    config: ModelConfig, device: torch.device, num_lanes: int, num_blocks: int, **options: Any
) -> ModelRunner:
    dtype = options.pop("dtype", "bfloat16")
    return ModelRunner(
        RandomWeights(config, device),
        dtype,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=min(4096, config.max_position_embeddings),
        progress=lambda fraction, text: None,
        device=str(device),
        max_num_seqs=num_lanes,
        native="off",
        **options,
    )


def requests(
    config: ModelConfig, count: int, prompt: tuple[int, int], wanted: int
) -> list[Sequence]:
    chosen = np.random.default_rng(1)
    lengths = chosen.integers(prompt[0], prompt[1] + 1, count)
    return [
        Sequence(chosen.integers(0, config.vocab_size, length).astype(np.int32), wanted)
        for length in lengths
    ]


def check_tokens(
    report: Report, device: torch.device, config: ModelConfig, sizes: tuple[int, int, int]
) -> None:
    """In float32: padded and captured steps with tokens fed on the device, the same kernels one by
    one, and the torch reference give the same tokens. sizes: requests, longest prompt, answer.
    """
    count, longest, wanted = sizes
    answers = {}
    for name, operations, is_warm, ahead in (
        ("captured, a step ahead", "triton", True, 1),
        ("one by one", "triton", False, 0),
        ("torch", "torch", False, 0),
    ):
        num_blocks = count * ((longest + wanted) // BLOCK_SIZE + 1) + 1
        options = {"dtype": "float32", "operations": operations}
        runner = load(config, device, count, num_blocks, **options)
        if is_warm:
            runner.capture()
        sequences = requests(config, count, (1, longest), wanted)
        Loop(runner, count, 48, ahead).run(sequences)
        answers[name] = [sequence.generated for sequence in sequences]
    total = count * wanted
    for name in ("captured, a step ahead", "one by one"):
        pairs = zip(answers[name], answers["torch"], strict=True)
        wrong = sum(a != b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
        report.add(
            "checks",
            name=f"engine tokens, {name}",
            dtype="float32",
            error=wrong,
            bound=total // 50,
            ok=wrong <= total // 50,
        )


@dataclass(frozen=True)
class Load:
    """num_requests of prompt tokens each (a range) with so many answered."""

    num_requests: int = 256
    prompt: tuple[int, int] = (64, 512)
    wanted: int = 128
    num_lanes: int = 128
    budget: int = 4096


def measure_engine(
    report: Report,
    device: torch.device,
    name: str,
    config: ModelConfig,
    ceilings: Ceilings,
    load_of: Load,
    **options: Any,
) -> None:
    """Steps of one kind, then a load of requests."""
    longest = load_of.prompt[1] + load_of.wanted
    num_blocks = load_of.num_lanes * (longest // BLOCK_SIZE + 2) + 1
    runner = load(config, device, load_of.num_lanes, num_blocks, **options)
    started = time.monotonic()
    runner.warm_up()
    warm_s = time.monotonic() - started
    warmed = requests(config, min(8, load_of.num_requests), load_of.prompt, 4)
    Loop(runner, load_of.num_lanes, load_of.budget).run(warmed)
    sequences = requests(config, load_of.num_requests, load_of.prompt, load_of.wanted)
    loop = Loop(runner, load_of.num_lanes, load_of.budget)
    began = time.monotonic()
    loop.run(sequences)
    spent = time.monotonic() - began
    generated = sum(len(s.generated) for s in sequences)
    prompts = sum(len(s.prompt) for s in sequences)
    entry = {
        "engine": "streetcar",
        "model": name,
        "options": {key: str(value) for key, value in options.items()},
        "warm_up_s": warm_s,
        "seconds": spent,
        "output_tokens_s": generated / spent,
        "all_tokens_s": (generated + prompts) / spent,
        "steps": loop.num_steps,
    }
    report.add("engines", **entry)
    for lanes in (1, load_of.num_lanes):
        _measure_decode(report, runner, name, lanes, load_of.prompt[1], ceilings)
    _measure_prefill(report, runner, name, load_of.prompt[1], ceilings)


def _measure_decode(
    report: Report, runner: ModelRunner, name: str, lanes: int, context: int, ceilings: Ceilings
) -> None:
    """Steps that decode alone: weights and KV read, over the time, as a share of a copy's speed."""
    config, steps = runner.config, 32
    sequences = requests(config, lanes, (context, context), steps + 8)
    loop = Loop(runner, lanes, 1 << 20)
    began = time.monotonic()
    # What lies in the blocks does as well as the prompts.
    loop.run(sequences, skip_prompts=True)
    step_s = (time.monotonic() - began) / loop.num_steps
    width = runner.dtype.itemsize
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    num_bytes = num_parameters(config) * width + lanes * context * per_token
    report.add(
        "speed",
        name=f"decode step, {name}",
        case=f"{lanes} lanes of {context}",
        ms=step_s * 1e3,
        gb_s=num_bytes / step_s / 1e9,
        share_of_copy=num_bytes / step_s / 1e9 / ceilings.copy_gb_s,
    )


def _measure_prefill(
    report: Report, runner: ModelRunner, name: str, length: int, ceilings: Ceilings
) -> None:
    sequences = requests(runner.config, 32, (length, length), 1)
    loop = Loop(runner, 32, 4096)
    began = time.monotonic()
    loop.run(sequences)
    spent = time.monotonic() - began
    flops = 2.0 * num_parameters(runner.config) * 32 * length
    report.add(
        "speed",
        name=f"prefill, {name}",
        case=f"32 x {length}",
        ms=spent * 1e3,
        gflop_s=flops / spent / 1e9,
        share_of_product=flops / spent / 1e9 / ceilings.gflop_s,
    )


def measure_transformers(
    report: Report, device: torch.device, name: str, config: ModelConfig, load_of: Load
) -> None:
    """The same requests by `transformers`' continuous batching on a model of the same shape."""
    try:
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        report.add("skipped", part=f"transformers {name}", reason=str(error))
        return
    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(shape).eval()
    finally:
        torch.set_default_dtype(before)
    settings = GenerationConfig(
        max_new_tokens=load_of.wanted, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    sequences = requests(config, load_of.num_requests, load_of.prompt, load_of.wanted)
    prompts = [sequence.prompt.tolist() for sequence in sequences]
    with torch.inference_mode():
        model.generate_batch(inputs=prompts[:8], generation_config=settings)
        began = time.monotonic()
        outputs = model.generate_batch(inputs=prompts, generation_config=settings)
        spent = time.monotonic() - began
    generated = sum(len(output.generated_tokens) for output in outputs.values())
    report.add(
        "engines",
        engine="transformers",
        model=name,
        seconds=spent,
        output_tokens_s=generated / spent,
        all_tokens_s=(generated + sum(map(len, prompts))) / spent,
    )
