"""Loads an exported model where neither Megatron nor this package can be imported: ``FOLDER TOKENS.pt OUTPUT.pt [logits]``."""

import copy
import importlib.util
import sys

import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, tokens_path, output, *only = sys.argv[1:]
assert importlib.util.find_spec("megacpp_mcore") is None
sys.modules["megatron"] = None  # which this environment has
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
tokens = torch.load(tokens_path)["tokens"]
rows, cut, padding = tokens.shape[1], 20, 7
results = {"text": tokenizer.decode(tokenizer("ümläut(\n")["input_ids"]), "parameters": model.num_parameters()}
with torch.no_grad():
    results["logits"] = model(tokens, use_cache=False).logits
    results["ahead"] = model.predict_ahead(tokens)[0]
    first = model(tokens[:, :cut], use_cache=True)
    steps = [model(tokens[:, i : i + 1], past_key_values=first.past_key_values).logits for i in range(cut, rows)]
    results["cached"] = torch.cat([first.logits, *steps], dim=1)
    first = model(tokens[:, :cut], use_cache=True)  # as transformers 5.24 calls it
    results["cached by its new name"] = model(tokens[:, cut:], cache=first.past_key_values).logits
    if only:
        torch.save(results, output)
        sys.exit()
    pads = torch.full((1, padding), tokenizer.pad_token_id)
    both = torch.cat([torch.cat([pads, tokens[:, :-padding]], dim=1), tokens])
    mask = torch.ones_like(both)
    mask[0, :padding] = 0
    results["padded"] = model(both, attention_mask=mask).logits
    results["padded on the right"] = model(both.flip(1), attention_mask=mask.flip(1)).logits[0, :-padding]
    results["without padding"] = model(both[:1].flip(1)[:, :-padding]).logits[0]
    greedy = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    results["generated"] = model.generate(tokens[:, :cut], **greedy)
    results["long"] = model.generate(tokens[:, :cut], **greedy | {"max_new_tokens": 80})
    results["by two"] = model.generate(both[:, :cut], attention_mask=mask[:, :cut], **greedy)
    results["beams"] = model.generate(tokens[:, :cut], max_new_tokens=5, num_beams=3)
    rounded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16).eval()
    results["offloaded"] = cpu_offload(copy.deepcopy(model), torch.device("cpu"))(tokens, use_cache=False).logits
    results["bf16"] = rounded(tokens, use_cache=False).logits
model.train()
model.gradient_checkpointing_enable()
for checkpointing in (True, False):
    model.zero_grad()
    loss = model(tokens, labels=tokens, use_cache=True).loss
    loss.backward()
    results[f"gradient {checkpointing}"] = model.model.layers[0].norm.weight.grad.clone()
    model.gradient_checkpointing_disable()
results["loss"] = loss.detach()
torch.manual_seed(1)
fresh = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
results["fresh"] = max(float(weight.abs().max()) for weight in fresh.parameters())
model.save_pretrained(f"{folder}_saved")
learned = copy.deepcopy(model)  # the text by heart, by the layers and by the block for multi-token prediction
optimizer = torch.optim.Adam([weight for weight in learned.parameters() if weight.requires_grad], lr=3e-3)
for _ in range(30):
    optimizer.zero_grad()
    loss = learned(tokens, labels=tokens).loss + F.cross_entropy(learned.predict_ahead(tokens)[0][0, :-2], tokens[0, 2:])
    loss.backward()
    optimizer.step()
results["speculative"], results["refused"] = [], []
for decoder in (learned.eval(), model.eval(), fresh.eval()):
    end = int(decoder.generate(tokens[:, :cut], **greedy)[0, cut + 9])
    for prompt, drafts, more in (
        (tokens[:, :cut], None, {}),
        (tokens[:, 30:31], 1, {"repetition_penalty": 1.5}),
        (tokens[:, :50], 3, {}),
        (tokens[:, :cut], 3, {"eos_token_id": end}),
    ):
        plain, counts = decoder.generate(prompt, **greedy | more), {}
        with_drafts = {"custom_generate": type(decoder).speculate, "drafts": drafts, "counts": counts}
        drafted = decoder.generate(prompt, **greedy | more, **with_drafts)
        decoder.config.mtp_depth = 3
        with torch.no_grad():
            ahead = torch.cat(decoder.predict_ahead(plain)).argmax(-1)
        decoder.config.mtp_depth = 1
        results["speculative"].append((prompt.shape[1], drafts or 1, plain, drafted, counts, ahead))
for prompt, options in (
    (tokens[:, :5], {"do_sample": True}),
    (tokens[:, :5].expand(2, -1), {}),
    (tokens[:, :5], {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}),
    (tokens[:, :5], {"drafts": 0}),
):
    try:
        model.generate(prompt, **greedy | options, custom_generate=type(model).speculate)
    except ValueError as error:
        results["refused"].append(str(error))
restarts = torch.arange(tokens.shape[1]).remainder(tokens.shape[1] // 2)[None]
for inputs in (
    {"input_ids": tokens, "position_ids": restarts},
    {"input_ids": tokens, "kept": first.past_key_values},
    {"input_ids": tokens[:, :0]},
    {"input_ids": tokens, "output_attentions": True},
    {"input_ids": tokens[:0]},
    {"input_ids": tokens[0]},
    {"input_ids": tokens[:, :5], "attention_mask": torch.tensor([[1, 1, 0, 0, 1]])},
    {"input_ids": tokens[:, :5], "attention_mask": torch.ones(1, 4)},
    {"pattern": "AE", "attention_roles": ".-"},
):
    try:
        (type(model.config) if "pattern" in inputs else model)(**inputs)
    except ValueError as error:
        results["refused"].append(str(error))
with torch.no_grad():
    states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    results["states"] = len(states), model.lm_head(states[-1]), model(tokens, use_cache=False, return_dict=False)[0]
torch.save(results, output)
