"""Names of transformers, by the place where people write them. The package's are asked for in `nnx.models`, too."""

_LOAD = "nnx.models.from_pretrained(directory), which finds the class in config.json"
_SMALL = "nnx.quantize(model, bits=4), after loading"
_DTYPE = "dtype=jnp.bfloat16"
_PLACES = "mesh= and rules=; a model on one device needs nothing"

PACKAGE = {
    "AutoModel": _LOAD,
    "AutoModelForCausalLM": _LOAD,
    "AutoModelForMaskedLM": _LOAD,
    "AutoModelForSeq2SeqLM": _LOAD,
    "AutoModelForSequenceClassification": _LOAD,
    "AutoModelForImageClassification": _LOAD,
    "AutoConfig": "nnx.models.from_pretrained(directory, abstract=True).config",
    "AutoTokenizer": "nnx.models.Tokenizer.from_pretrained(directory)",
    "AutoImageProcessor": "nnx.models.ImageProcessor.from_pretrained(directory)",
    "pipeline": "nnx.models.from_pretrained(directory), nnx.models.Tokenizer and nnx.generate",
    "BitsAndBytesConfig": _SMALL,
    "TextStreamer": "nnx.generate(model, prompts, max_new_tokens=32, stream=print)",
    "Trainer": "a loop: nnx.jit of a step with nnx.value_and_grad and optimizer.update(grads), and nnx.TrainLog",
    "get_peft_model": "nnx.add_lora(model, rank)",
}

MODULE = {
    "generate": "nnx.generate(model, prompts, max_new_tokens=32), with prompts of shape (batch, length)",
    "save_pretrained": "nnx.models.save_pretrained(model, directory); for a Module of your own, nnx.save(path, model)",
    "from_pretrained": "nnx.models.from_pretrained(directory)",
    "push_to_hub": "nnx.models.save_pretrained(model, directory), and upload the directory",
}

FROM_PRETRAINED = {
    "load_in_4bit": _SMALL,
    "load_in_8bit": "nnx.quantize(model, bits=8), after loading",
    "quantization_config": _SMALL,
    "torch_dtype": _DTYPE,
    "device_map": _PLACES,
    "attn_implementation": "nothing: the fastest one is used; a layer takes implementation=name",
    "trust_remote_code": "nothing: no code of a checkpoint is run",
    "local_files_only": "nothing: files are always local",
    "low_cpu_mem_usage": "nothing: tensors are always read one by one",
}

TOKENIZER = "tokenizer.encode(text), a list of tokens; for a chat, tokenizer.chat(messages)"
