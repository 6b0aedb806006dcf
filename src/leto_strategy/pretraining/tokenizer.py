"""Text to tokens: bytes, or a tokenizer of Hugging Face."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from leto_strategy.errors import ConfigurationError

NUM_BYTES = 256


class Tokenizer(Protocol):
    """What turns text into tokens.

    Attributes:
        vocabulary: Number of different tokens, the end of a document included.
    """

    vocabulary: int

    def encode(self, text: str) -> Tensor:
        """Tokens of a document and the token that ends it, int32, one-dimensional."""
        ...


class ByteTokenizer:
    """UTF-8 bytes; token 256 ends a document."""

    vocabulary = NUM_BYTES + 1

    def encode(self, text: str) -> Tensor:
        """See `Tokenizer`."""
        data = bytearray(text.encode("utf-8", errors="surrogateescape") + b"\0")
        tokens = torch.frombuffer(data, dtype=torch.uint8).to(torch.int32)
        tokens[-1] = NUM_BYTES
        return tokens


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        source: A `tokenizer.json`, or a name on the Hub.
        end_token: Token that ends a document, as it is spelled in the vocabulary.

    Raises:
        ConfigurationError: The library is missing, there is no such tokenizer, or it does not know the token.
    """

    def __init__(self, source: str, *, end_token: str) -> None:
        library = _tokenizers(source)
        try:
            load = library.Tokenizer.from_file if Path(source).is_file() else library.Tokenizer.from_pretrained
            self._tokenizer = load(source)
        except Exception as error:  # the library has no classes for what can go wrong
            raise ConfigurationError(
                f"data.tokenizer={source!r} is neither 'bytes', nor a tokenizer.json, nor a tokenizer on the Hub:"
                f" {error}"
            ) from error
        end = self._tokenizer.token_to_id(end_token)
        if end is None:
            raise ConfigurationError(
                f"data.end_token={end_token!r} is not in the vocabulary of data.tokenizer={source!r}; name the"
                " token that ends a document there."
            )
        self._end = end
        self.vocabulary = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> Tensor:
        """See `Tokenizer`."""
        return torch.tensor([*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end], dtype=torch.int32)


def load_tokenizer(name: str, *, end_token: str, vocabulary: int) -> Tokenizer:
    """The tokenizer of this name.

    Args:
        name: "bytes", a `tokenizer.json`, or a name on the Hub.
        end_token: Token that ends a document; bytes have their own.
        vocabulary: Number of tokens that the network knows.

    Raises:
        ConfigurationError: There is none, or the network's vocabulary is too small for it.
    """
    tokenizer: Tokenizer = ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name, end_token=end_token)
    if tokenizer.vocabulary > vocabulary:
        raise ConfigurationError(
            f"data.tokenizer={name!r} has {tokenizer.vocabulary} tokens, the network {vocabulary}: set"
            f" data.vocabulary={tokenizer.vocabulary} or more."
        )
    return tokenizer


def _tokenizers(source: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigurationError(
            f"data.tokenizer={source!r} needs the package tokenizers: pip install 'leto-strategy[train]', or use"
            " data.tokenizer=bytes."
        ) from error
    return tokenizers
