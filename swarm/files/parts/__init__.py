"""Parts of weight files: the byte ranges of some tensors, in a file with holes. Never taken for a whole file."""
