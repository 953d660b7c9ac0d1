from __future__ import annotations

import msgspec
import pytest

from services.contracts import codec
from services.contracts.beats import Beat, ServiceKind
from services.contracts.codec import Decoder, encode
from services.contracts.errors import WireError
from services.contracts.kv import KvDelta, KvSnapshot, LeaseRequest, LookupRequest
from services.contracts.limits import MAX_BLOCKS, MAX_LANES
from services.contracts.sampling import SamplingParams, uint64
from services.contracts.sequences import Logprobs, join_logprobs, split_logprobs
from services.contracts.step import Attached, LaneJoin, Poll, StepPlan
from services.contracts.vectors import pack

POLL = Poll(1, 2, 3)


def test_a_payload_is_a_version_byte_and_one_tagged_array() -> None:
    payload = encode(POLL)
    assert payload[0] == codec.WIRE_VERSION == 1
    assert msgspec.msgpack.decode(payload[1:]) == ["poll", 1, 2, 3]
    assert Decoder(Poll).decode(payload) == POLL


def test_a_union_is_told_apart_by_its_tag() -> None:
    decoder = Decoder(LookupRequest, LeaseRequest)
    lease = LeaseRequest("e", 1, 1, 1, 5)
    lookup = LookupRequest(engine="e", generation=1, epoch=1, number=2, hashes=b"", token_ids=b"")
    assert decoder.decode(encode(lease)) == lease
    assert decoder.decode(encode(lookup)) == lookup
    with pytest.raises(WireError):
        decoder.decode(encode(POLL))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00" + encode(POLL)[1:],
        b"\x02" + encode(POLL)[1:],
        encode(POLL)[1:],
        encode(POLL) + b"\x00",
        encode(POLL)[:-1],
        b"\x01" + msgspec.msgpack.encode(["poll", 1, 2, 3, 4]),
        b"\x01" + msgspec.msgpack.encode(["poll", 1, 2]),
        b"\x01" + msgspec.msgpack.encode(["pull", 1, 2, 3]),
        b"\x01" + msgspec.msgpack.encode(["poll", 1, 2, "3"]),
        b"\x01" + msgspec.msgpack.encode(["poll", 1, 2, 3.5]),
        b"\x01" + msgspec.msgpack.encode({"type": "poll", "generation": 1}),
        b"\x01" + msgspec.msgpack.encode(None),
        b"\x01\x93\xa4poll\xa2\xff\xfe\x00",
        b"\x01" + b"\x91" * 100_000,
    ],
)
def test_anything_else_is_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        Decoder(Poll).decode(payload)


def test_fields_may_be_appended_with_a_default() -> None:
    plan = StepPlan(1, 1, 1, 1)
    fields = msgspec.msgpack.decode(encode(plan)[1:])
    older = b"\x01" + msgspec.msgpack.encode(fields[:5])
    assert Decoder(StepPlan).decode(older) == plan


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (
            LeaseRequest("e", 1, 1, 1, MAX_BLOCKS),
            LeaseRequest("e", 1, 1, 1, MAX_BLOCKS + 1),
        ),
        (LeaseRequest("e", 1, 1, 1, 1), LeaseRequest("e", 1, 1, 1, 0)),
        (LeaseRequest("e", 1, 1, 1, 1), LeaseRequest("e.f", 1, 1, 1, 1)),
        (
            Attached("a", 1, 1, 2, 1, MAX_LANES, 1, 1),
            Attached("a", 1, 1, 2, 1, MAX_LANES + 1, 1, 1),
        ),
        (Attached("a", 1, 1, 2, 1, 1, 1, 1), Attached("a", 1, 1, 1, 1, 1, 1, 1)),
    ],
)
def test_bounds_hold_on_the_wire(good: codec.Message, bad: codec.Message) -> None:
    decoder: Decoder[codec.Message] = Decoder(type(good))
    assert decoder.decode(encode(good)) == good
    with pytest.raises(WireError):
        decoder.decode(encode(bad))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=-0.1),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.5),
        SamplingParams(top_k=-1),
        SamplingParams(num_logprobs=21),
        SamplingParams(min_p=1.5),
        SamplingParams(repetition_penalty=0.0),
        SamplingParams(presence_penalty=-2.5),
        SamplingParams(frequency_penalty=2.5),
    ],
)
def test_sampling_is_bounded_where_it_crosses(sampling: SamplingParams) -> None:
    join = LaneJoin(lane=0, token_ids=pack([1]), num_prompt_tokens=1, sampling=sampling)
    with pytest.raises(WireError):
        Decoder(StepPlan).decode(encode(StepPlan(1, 1, 1, 1, join=[join])))


def test_a_seed_is_64_bits_whatever_its_sign() -> None:
    assert uint64(-1) == 2**64 - 1 and uint64(-(2**63)) == 2**63 and uint64(5) == 5
    sampling = SamplingParams(seed=2**64 - 1)
    join = LaneJoin(lane=0, token_ids=pack([1]), num_prompt_tokens=1, sampling=sampling)
    plan = Decoder(StepPlan).decode(encode(StepPlan(1, 1, 1, 1, join=[join])))
    assert plan.join[0].sampling.seed == 2**64 - 1


def test_vectors_cross_as_bytes() -> None:
    delta = KvDelta("e", 1, 1, 1, released=pack(range(256)))
    assert len(encode(delta)) < 4 * 256 + 40
    assert Decoder(KvDelta, KvSnapshot).decode(encode(delta)) == delta


def test_an_idle_beat_is_small() -> None:
    assert len(encode(Beat(ServiceKind.GATEWAY, "gateway-0"))) < 64


def test_logprobs_are_joined_and_split() -> None:
    singles = [
        Logprobs(b"aaaa", b"11112222", b"AAAABBBB"),
        Logprobs(b"bbbb", b"33334444", b"CCCCDDDD"),
    ]
    assert split_logprobs(join_logprobs(singles)) == singles
    assert split_logprobs(Logprobs(b"aaaabbbb")) == [Logprobs(b"aaaa"), Logprobs(b"bbbb")]
    assert split_logprobs(Logprobs(b"")) == []


@pytest.mark.parametrize(
    "columns", [(b"aaa",), (b"aaaa", b"11"), (b"aaaa", b"1111", b""), (b"", b"1111")]
)
def test_logprobs_whose_columns_differ_are_none(columns: tuple[bytes, ...]) -> None:
    with pytest.raises(WireError, match="columns"):
        split_logprobs(Logprobs(*columns))
