/* All operations for one instruction set; library.c includes this once for each. */

#include "vector.h"
#include "product.h"
#include "quantise.h"
#include "attention_pack.h"
#include "attention_task.h"
#include "attention.h"
#include "linear.h"
#include "linear_int8.h"
#include "elementwise.h"
#include "decoder.h"
#include "ceilings.h"

#undef F
#undef ISA_LEVEL
#undef LANES
#undef MAX_ROWS
#undef MAX_VECTORS
#undef vf
#undef vi
#undef vu
#undef vh
#undef vb
