"""One line for each command, so that `seq2engine --help` imports none. A test compares them with the commands' own."""

from __future__ import annotations

SUMMARIES = {
    "demo": "run the whole pipeline on small models, on this machine, without a GPU",
    "train": "train a model on parallel text: TSV, or two aligned files",
    "import": "convert a checkpoint of Hugging Face, fairseq, OpenNMT-py or torch.nn",
    "export": "write a checkpoint's ONNX graphs as a bundle",
    "build": "build TensorRT engines of a bundle",
    "refit": "make the engines of a bundle from those of another by swapping the weights",
    "plan": "choose profiles for a file of real requests, and print the command that builds them",
    "package": "make a folder that a GPU machine can verify with TensorRT and numpy alone",
    "push": "upload a bundle to the Hugging Face hub, with a model card made of its reports",
    "inspect": "show what a bundle holds: graphs, precision census, engines, launches",
    "run": "decode lines: text where the bundle has a tokenizer, else token ids",
    "transcribe": "transcribe or translate speech: audio files to text, subtitles or JSON",
    "read": "read text in pictures: image files to lines of text, or JSON",
    "score": "score given outputs: log-probability and perplexity of lines of source<TAB>target",
    "serve": "serve a model over HTTP: JSON, streaming, metrics and a page to try it",
    "triton": "write a Triton model repository: continuous batching across requests, streamed answers",
    "parity": "compare a backend with PyTorch, or any two: graphs, tensors, steps, whole decodes",
    "attention": "show the cross-attention weights of one decode, every layer and head, as HTML",
    "bench": "time encoder, step and whole decodes, outputs compared first",
    "completion": "print a script that completes commands and flags: source <(seq2engine completion bash)",
}
