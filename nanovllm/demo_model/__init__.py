"""The bundled demo model: a folder of weights, tokenizer, configs and model card, carried as package data.
No code here: `tools/train_demo_model.py` makes the files, `nanovllm.demo_model_path()` finds them."""
