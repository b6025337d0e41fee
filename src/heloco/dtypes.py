"""Which parameters can be trained."""

import torch

HALF = {torch.bfloat16, torch.float16}
TRAINABLE = {torch.float64, torch.float32, *HALF}
CAN_BE_TRAINED = "only parameters in float64, float32, bfloat16 or float16 can be trained."
