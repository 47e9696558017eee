"""`cairn-llm[sglang]`: Cairn's sparse attention inside stock SGLang.

SGLang keeps its scheduler, its KV pool, its page tables and its radix cache. The plug-in brings an
attention backend and the models that were trained with landmarks.
"""
