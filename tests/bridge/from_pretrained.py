"""Loads an exported model where neither Megatron nor this package can be imported: ``FOLDER TOKENS.pt OUTPUT.pt``."""

import importlib.util
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, tokens_path, output = sys.argv[1:]
assert importlib.util.find_spec("megacpp_mcore") is None
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
tokens = torch.load(tokens_path)["tokens"]
rows, cut, padding = tokens.shape[1], 20, 7
found = {"text": tokenizer.decode(tokenizer("ümläut(\n")["input_ids"]), "parameters": model.num_parameters()}
with torch.no_grad():
    found["logits"] = model(tokens, use_cache=False).logits
    found["ahead"] = model.predict_ahead(tokens)[0]
    first = model(tokens[:, :cut], use_cache=True)
    steps = [model(tokens[:, i : i + 1], past_key_values=first.past_key_values).logits for i in range(cut, rows)]
    found["cached"] = torch.cat([first.logits, *steps], dim=1)
    pads = torch.full((1, padding), tokenizer.pad_token_id)
    both = torch.cat([torch.cat([pads, tokens[:, :-padding]], dim=1), tokens])
    mask = torch.ones_like(both)
    mask[0, :padding] = 0
    found["padded"] = model(both, attention_mask=mask).logits
    greedy = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    found["generated"] = model.generate(tokens[:, :cut], **greedy)
    found["by two"] = model.generate(both[:, :cut], attention_mask=mask[:, :cut], **greedy)
    found["beams"] = model.generate(tokens[:, :cut], max_new_tokens=5, num_beams=3)
model.train()
model.gradient_checkpointing_enable()
for checkpointing in (True, False):
    model.zero_grad()
    loss = model(tokens, labels=tokens, use_cache=True).loss
    loss.backward()
    found[f"gradient {checkpointing}"] = model.model.layers[0].norm.weight.grad.clone()
    model.gradient_checkpointing_disable()
found["loss"] = loss.detach()
fresh = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
found["fresh"] = max(float(one.abs().max()) for one in fresh.parameters())
model.save_pretrained(f"{folder}_saved")
torch.save(found, output)
