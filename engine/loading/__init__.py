"""Reading models: Hugging Face directories, GGUF, dummy weights, tokenizers, chat templates."""
