"""Models in GGUF, llama.cpp's file format: their config, tokenizer and weights as transformers knows them."""
