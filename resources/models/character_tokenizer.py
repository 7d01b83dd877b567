"""A tokenizer with one token a character, for models built here: a real `transformers` tokenizer that vLLM loads."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)
"""Ids 0 to 3. Pad and end-of-sequence differ: a response ends where it says so, not where padding starts."""
CHARACTERS = "\n 0123456789=+-*/%^()[]{}<>.,:;!?#$&@_|~'\"`\\abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Printable ASCII and the line feed: tasks such as `53172=` -> `12357`, sums, and short English texts."""
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}{% endif %}"
)
"""Contents one after another: a model of characters knows no roles."""


def build_character_tokenizer(max_positions: int = 2048) -> PreTrainedTokenizerFast:
    """The character tokenizer; `encode` adds no special tokens, and decode(encode(text)) is the text.

    >>> tokenizer = build_character_tokenizer()
    >>> tokenizer.decode(tokenizer.encode("53172=\\n"))
    '53172=\\n'
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        chat_template=CHAT_TEMPLATE,
    )


def save_character_tokenizer(folder: Path, max_positions: int = 2048) -> None:
    """Write the tokenizer's files into `folder`, from where `transformers` and vLLM load it."""
    build_character_tokenizer(max_positions).save_pretrained(folder)
