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
    "get_peft_model": "nnx.add_lora(model, rank, ctx=ctx)",
    "LoraConfig": 'nnx.add_lora(model, rank, alpha=alpha, where="**/attention/*", ctx=ctx)',
    "PeftModel": "nnx.models.load_adapter(model, directory)",
    "GenerationConfig": "nnx.generate(model, prompts, **nnx.models.generation_defaults(directory))",
    "TrainingArguments": "a loop of your own: nnx.Optimizer, nnx.jit of a step, and nnx.TrainLog",
}

MODULE = {
    "generate": "nnx.generate(model, prompts, max_new_tokens=32), with prompts of shape (batch, length)",
    "save_pretrained": "nnx.models.save_pretrained(model, directory); for a Module of your own, nnx.save(path, model)",
    "from_pretrained": "nnx.models.from_pretrained(directory)",
    "num_parameters": "nnx.count_params(model)",
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

GENERATE = {
    "max_length": "`max_new_tokens=`, which does not count the prompt",
    "do_sample": "`temperature=0` for the most likely tokens; any other one draws, with `ctx=nnx.context(sample=0)`",
    "eos_token_id": "`stop_tokens=tokenizer.stop_tokens`",
    "pad_token_id": "`pad_token=`",
    "attention_mask": "`lengths=`: prompts are padded on the right",
    "streamer": "`stream=print`, a function that is called with the tokens",
    "num_return_sequences": "`num_samples=`",
    "generation_config": "`**nnx.models.generation_defaults(directory)`",
}

ADD_LORA = {
    "r": "the second argument, `rank`",
    "lora_alpha": "`alpha=`",
    "target_modules": '`where="**/attention/query"`, a filter over the paths of this model',
    "lora_dropout": "nothing: an adaptation has no dropout",
    "init_lora_weights": "`a_initializer=` and `b_initializer=`",
}

NOT_CALLED = "tokenizer.encode(text), a list of tokens; for a chat, tokenizer.chat(messages)"

TOKENIZER = {
    "apply_chat_template": "tokenizer.chat(messages), the tokens; the text is tokenizer.chat_text(messages)",
    "tokenize": "tokenizer.encode(text)",
    "batch_decode": "[tokenizer.decode(row) for row in tokens]",
    "batch_encode_plus": "[tokenizer.encode(text) for text in texts]; nnx.generate wants them padded on the right",
    "pad": "pad on the right, and pass the number of real tokens as lengths=",
    "eos_token": 'tokenizer.special_tokens["eos_token"]',
    "eos_token_id": "tokenizer.stop_tokens, for nnx.generate(..., stop_tokens=tokenizer.stop_tokens)",
    "bos_token": 'tokenizer.special_tokens["bos_token"]',
    "pad_token": 'tokenizer.special_tokens["pad_token"]',
    "pad_token_id": "nothing: nnx.generate does not read what is beyond the lengths of prompts",
}

CONFIG = {
    "hidden_size": "config.features",
    "intermediate_size": "config.hidden_features",
    "num_hidden_layers": "config.num_layers",
    "num_attention_heads": "config.num_heads",
    "num_key_value_heads": "config.num_kv_heads",
    "max_position_embeddings": "config.max_length",
    "hidden_act": "config.activation",
    "rms_norm_eps": "config.norm_epsilon",
    "rope_theta": "config.rotary.base",
    "tie_word_embeddings": "config.tie_embeddings",
    "num_labels": "len(config.labels)",
    "eos_token_id": "nnx.models.generation_defaults(directory) has the stop tokens",
}
