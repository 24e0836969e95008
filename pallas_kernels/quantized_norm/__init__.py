"""Root-mean-square normalization whose rows are quantized for the matmuls that read them."""
