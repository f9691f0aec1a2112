"""The number that masks attention scores, added to them or in their place."""

# exp(-30000) is 0 in fp32 and fp16 alike, and unlike -65504 it stays finite in fp16 when a score is added
# to it; a row with nothing to see becomes uniform, not NaN.
MASKED = -30000.0
