"""What loads send: readers of dataset and trace files, and the prompts that are made for them.

`block_tokens.py` tokens of hashed blocks, for every load that replays a prefix structure · `text.py` prompts as text of
an exact token count · `items.py` where each item of a large file lies · `requests.py` request bodies · one module per
kind of file beside them. The `random` load is `bench/random_load.py`.
"""
