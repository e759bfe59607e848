"""Small tokenizers as files: a byte-level one, and one of the Llama kind in both of its formats."""

import json
from pathlib import Path

TEXTS = [
    "the cat sat on the mat and the dog sat on the log",
    "naïve café, 日本語 and emoji 😀 in one line\n",
    "  spaces   and\ttabs\n\n",
    "1234567890 + - * / = (x) [y] {z}",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_config(folder: Path, **config: object) -> None:
    """tokenizer_config.json with the usual BOS and EOS unless said otherwise."""
    said = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | config))


def write_byte_level(folder: Path, *, template: bool = True, **config: object) -> Path:
    """A GPT-2 style tokenizer: <s> 0, </s> 1, then bytes; <tool call> is added, not special."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, **config)
    return folder


def write_sentencepiece(folder: Path) -> Path:
    """tokenizer.model alone, trained like Llama's: byte fallback, a space before every text."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def write_words(folder: Path) -> Path:
    """Whole words with a decoder of another kind, as a user's own tokenizer may be."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["[UNK]", "the", "cat", "##s", "sat", "down"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
