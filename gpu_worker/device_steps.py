"""Steps on the device of a model: inputs in, the model, sampling, results out, all of it queued.

Invariants: the last token of every lane stays on the device, so that a step can be queued before
the host has the tokens of the one before; what a step returns is copied before the next one may
overwrite it.

Device: runs the model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.graphs import DecodeGraphs, graph_sizes
from gpu_worker.inputs import (
    Bools,
    PromptLogprobRequest,
    StepInputs,
    StepOutputs,
    TokenLogprobs,
)
from gpu_worker.kv_cache import KVCache
from gpu_worker.model.llama import LlamaModel
from gpu_worker.model.operations import Operations
from gpu_worker.results import Fetch, Results
from gpu_worker.sampler import read_scores, score_sampled, score_targets, wanted_rows
from gpu_worker.staging import Staging, StepTensors, view_inputs

MAX_PROMPT_LOGPROB_ROWS = 128
"""Logits held at once when scoring prompts: 25 MB of float32 with a vocabulary of 49,152."""


class Computed(NamedTuple):
    """hidden: (T, hidden_size); logits: (S, vocab_size); sampled: (2, S) int64, tokens and whether
    their rows are finite.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    sampled: torch.Tensor


class DeviceSteps:
    """Where the operations can be captured, steps in which every sequence decodes are."""

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        operations: Operations,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        device = cache.tensors[0].device
        self._model = model
        self._cache = cache
        self._operations = operations
        # One more, for rows whose token is no lane's.
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._results = Results(device)
        is_staged = device.type != "cpu" or operations.can_capture
        self._staging = Staging(device, no_lane=max_num_seqs) if is_staged else None
        self._graphs: DecodeGraphs[Computed] | None = None
        if operations.can_capture:
            max_blocks = -(-max_model_len // cache.block_size)
            sizes = graph_sizes(max_num_seqs)
            self._graphs = DecodeGraphs(self._compute, device, sizes, max_blocks, max_num_seqs)

    @torch.inference_mode()
    def submit(self, inputs: StepInputs) -> Fetch:
        """Queue a step; ``read_outputs`` reads what comes."""
        computed = self._run(inputs)
        num_rows = inputs.logits_rows.shape[0]
        sampled = computed.sampled[:, :num_rows]
        score, logits = self._operations.logprobs, computed.logits[:num_rows]
        scores = score_sampled(score, logits, sampled[0], inputs.sampling)
        tensors = [sampled, *(tensor for score in scores for tensor in score)]
        for request in inputs.prompt_logprobs:
            for first in _firsts(request):
                rows = min(MAX_PROMPT_LOGPROB_ROWS, request.num_rows - first)
                start = request.first_row + first
                logits = self._model.logits(computed.hidden[start : start + rows])
                tensors.extend(score_targets(score, logits, request, first))
        return self._results.fetch(tensors)

    @torch.inference_mode()
    def capture(self, blank: Any) -> None:
        """Capture decode steps of every size, where there are graphs; blank: (size) -> inputs."""
        if self._graphs is not None:
            self._graphs.capture_all(blank)

    def _run(self, inputs: StepInputs) -> Computed:
        if self._graphs is not None:
            size = self._graphs.size_for(inputs)
            if size is not None:
                return self._graphs.run(inputs, size)
        if self._staging is None:
            return self._compute(view_inputs(inputs))
        self._staging.stage(inputs)
        return self._compute(self._staging.tensors(inputs))

    def _compute(self, step: StepTensors) -> Computed:
        """The whole step; reads nothing back from a device."""
        batch, lanes = step.batch, step.input_lanes
        if lanes is not None:
            known = self._last_tokens.index_select(0, lanes.clamp(min=0)).to(torch.int32)
            batch = batch.with_input_ids(torch.where(lanes >= 0, known, batch.input_ids))
        hidden = self._model.forward(batch, self._cache)
        logits = self._model.logits(hidden.index_select(0, step.logits_rows))
        scores = logits
        if step.penalties is not None:
            # In float32: a small penalty is less than a step of bfloat16. The log-probabilities are
            # those of the logits as they were.
            scores = logits.to(torch.float32, copy=True)
            self._operations.penalise(scores, *step.penalties)
        tokens, finite = self._operations.sample(scores, step.draws)
        if step.output_lanes is not None:
            self._last_tokens.index_copy_(0, step.output_lanes.long(), tokens)
        return Computed(hidden, logits, torch.stack((tokens, finite.long())))


def _firsts(request: PromptLogprobRequest) -> range:
    return range(0, request.num_rows, MAX_PROMPT_LOGPROB_ROWS)


def read_outputs(inputs: StepInputs, arrays: list[npt.NDArray[Any]]) -> StepOutputs:
    """What the tensors of ``DeviceSteps.submit`` mean, once they are on the host."""
    parts = iter(arrays)
    tokens, flags = next(parts)
    finite: Bools = flags.astype(np.bool_)
    logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
    rows = wanted_rows(inputs.sampling)
    if rows.size:
        counts = inputs.sampling.num_logprobs[rows].tolist()
        scores = (next(parts), next(parts), next(parts))
        entries = read_scores(scores, counts, finite[rows].tolist())
        for row, entry in zip(rows.tolist(), entries, strict=True):
            logprobs[row] = entry
    prompt_logprobs: list[list[TokenLogprobs | None]] = []
    for request in inputs.prompt_logprobs:
        scored: list[TokenLogprobs | None] = []
        for _ in _firsts(request):
            sound = next(parts).tolist()
            scores = (next(parts), next(parts), next(parts))
            scored.extend(read_scores(scores, [request.num_logprobs] * len(sound), sound))
        prompt_logprobs.append(scored)
    return StepOutputs(tokens.astype(np.int32), finite, logprobs, prompt_logprobs)
