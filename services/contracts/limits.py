"""Named bounds on everything that crosses the wire or grows; overflow is described at each.

Pure. A limit that users may tune is a setting; these are the ceilings that settings stay below.
"""

from __future__ import annotations

from typing import Final

# Wire. nats-server is configured with the same payload limit; a larger request is refused (413).
MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
PAYLOAD_MARGIN_BYTES: Final = 64 * 1024

# Requests: a larger value is refused with `invalid_request` before any work is done.
MAX_PROMPT_CHARS: Final = 4 * 1024 * 1024
MAX_PROMPT_TOKENS: Final = 1024 * 1024
MAX_MESSAGES: Final = 1024
MAX_CONTENT_PARTS: Final = 256
MAX_NAME_CHARS: Final = 256
MAX_OUTPUT_TOKENS: Final = 1024 * 1024
MAX_TEMPERATURE: Final = 100.0
MAX_REPETITION_PENALTY: Final = 10.0
MAX_PENALTY: Final = 2.0
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_LOGPROBS: Final = 20
MAX_CACHE_SALT_CHARS: Final = 64
MAX_PRIORITY: Final = 100
MAX_DEADLINE_MS: Final = 24 * 3600 * 1000
MAX_SEED: Final = 2**63 - 1
MAX_TOKEN_ID: Final = 2**31 - 1

# Engine shape: ceilings for settings and for what a peer may claim.
MAX_LANES: Final = 4096
MAX_BLOCK_SIZE: Final = 1024
MAX_BLOCKS: Final = 2**24
MAX_MODEL_LEN: Final = 1024 * 1024

# Step protocol (DESIGN section 5).
MAX_STEPS_IN_FLIGHT: Final = 2
KEPT_PLANS: Final = 8
# A worker whose step runs longer than max(10 s, 10 x predicted) ends itself.
MIN_STEP_LIMIT_S: Final = 10
STEP_LIMIT_FACTOR: Final = 10

# Scheduler: a finished sequence waits for its acknowledgement this long, in this many entries.
FINISHED_LOG_SECONDS: Final = 60
FINISHED_LOG_ENTRIES: Final = 16384

# Liveness: a service beats at this period and is suspect after three missed beats.
BEAT_PERIOD_MS: Final = 250
SUSPECT_AFTER_BEATS: Final = 3

# Text: a client sees a frame at least this often while its tokens flow (DESIGN section 3).
MAX_FRAME_DELAY_MS: Final = 50
CANCEL_TOMBSTONE_SECONDS: Final = 10
MAX_TOMBSTONES: Final = 16384

# A frame of a stream that has much to catch up with (a resume, an adoption) goes out in parts.
MAX_FRAME_TOKENS: Final = 1024

# Recovery. An ended request can be resumed for a while; the oldest go first where there are more.
ENDED_SECONDS: Final = 10
MAX_ENDED: Final = 4096
MAX_ENDED_BYTES: Final = 64 * 1024 * 1024
# A request for whose frames nobody has listened so long is aborted.
UNHEARD_SECONDS: Final = 5
# An engine that was heard so lately is waited for, as long.
ENGINE_ABSENCE_SECONDS: Final = 10
# Log-probabilities that a submission repeats: of 24,000 tokens with 10 alternatives each.
MAX_RESENT_LOGPROB_BYTES: Final = 2 * 1024 * 1024
# What an engine has begun waits longer, as a worker may have a large model to load again; then it
# goes to another engine, or ends with `no_worker`.
ENGINE_LOST_SECONDS: Final = 60

MAX_ERROR_CHARS: Final = 2048
MAX_ENVELOPE_BYTES: Final = 64 * 1024
MAX_TRACE_CHARS: Final = 128
MAX_TRACESTATE_CHARS: Final = 512
MAX_NAMES: Final = 256
# Of one list in a message between services: several times what one step of all lanes can fill.
MAX_ENTRIES: Final = 16 * MAX_LANES

# Spans, per service: the oldest give way; those not yet shared or exported are dropped and counted.
MAX_SPANS_KEPT: Final = 8192
MAX_SPAN_BYTES_KEPT: Final = 8 * 1024 * 1024
MAX_SPANS_SENT: Final = 512
MAX_SPANS_QUEUED: Final = 4096
MAX_SPAN_NAME_CHARS: Final = 128
MAX_ATTRIBUTE_CHARS: Final = 256
MAX_ATTRIBUTES: Final = 32
MAX_SPAN_LINKS: Final = 64
