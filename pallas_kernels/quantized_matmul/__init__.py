"""Matrix product with a quantized weight, and the formats of quantized weights."""
