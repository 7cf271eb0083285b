"""Small language models, one for every kind of layer and of misuse."""

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

VOCABULARY, SIZE = 23, 6


class RootMeanSquare(nn.Module):
    """As transformers writes it: in wide numbers, the weight multiplied last."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float() if x.dtype == torch.bfloat16 else x
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )


class Chain(nn.Module):
    """Embedding, some layers, and a linear layer to the vocabulary."""

    def __init__(self, *layers, padding_idx=None, tied=False, size=SIZE, out_size=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size, padding_idx=padding_idx)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(out_size or size, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else torch.tanh(hidden)
        return self.head(hidden)


class Twice(nn.Module):
    """A layer used on its own output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.sin(self.layer(x))) + x


class Flat(nn.Module):
    """A layer that sees the tokens of all rows in one line."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class Heads(nn.Module):
    """A layer over each of several heads, as Qwen 3 normalises them."""

    def __init__(self, layer, num_heads):
        super().__init__()
        self.layer, self.num_heads = layer, num_heads

    def forward(self, x):
        return self.layer(x.unflatten(-1, (self.num_heads, -1))).flatten(-2)


class Positions(nn.Module):
    """Position embeddings that all rows share: [T] or [1, T] ids, unsqueezed or not."""

    def __init__(self, spelling):
        super().__init__()
        self.table, self.spelling = nn.Embedding(16, SIZE), spelling

    def forward(self, x):
        ids = torch.arange(x.shape[1])
        places = {
            "T": lambda: self.table(ids),
            "1T": lambda: self.table(ids[None]),
            "T unsqueezed": lambda: self.table(ids).unsqueeze(0),
            "T[None]": lambda: self.table(ids)[None],
            "BT": lambda: self.table(ids.expand(len(x), -1)),
            "flat": lambda: self.table(ids.repeat(len(x))).view_as(x),
        }
        return x + places[self.spelling]()


class Last(nn.Module):
    """A recurrent layer's outputs, without its state."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


class Stretch(nn.Module):
    """A parameter that only its own formula knows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(0.1 * torch.ones(SIZE))

    def forward(self, x):
        return x * (1 + x.square()) ** self.scale


class Made(nn.Module):
    """A parameter of any rank that meets rows only after something was made of it."""

    def __init__(self, make, meet, *shape):
        super().__init__()
        self.own = nn.Parameter(0.3 * torch.randn(shape))
        self.make, self.meet = make, meet

    def forward(self, x):
        return self.meet(x, self.make(self.own))


class Channels(nn.Module):
    """A convolution over positions that looks left only."""

    def __init__(self, **options):
        super().__init__()
        self.convolution = nn.Conv1d(SIZE, SIZE, 3, padding=2, **options)

    def forward(self, x):
        return self.convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def over_heads(x, weight):
    """Each of two heads times a matrix of its own, tokens of all rows in one line."""
    heads = x.reshape(-1, 2, SIZE // 2).permute(1, 0, 2)
    return torch.bmm(heads, weight).permute(1, 0, 2).reshape(x.shape)


def in_place(x, weight):
    changed = x.clone()
    changed.mul_(weight)
    changed += weight
    return changed


def by_fixed_norm(own):
    """Divided by its norm, through which no gradient goes, as DoRA has it."""
    with torch.no_grad():
        norm = own.norm()
    return own / norm


MADE = {
    "1 + weight": lambda: Made(lambda own: 1.0 + own.float().to(own.dtype), torch.mul, SIZE),
    "exp": lambda: Made(lambda own: own.exp(), lambda x, made: made * x, SIZE),
    "vector less": lambda: Made(lambda own: 1 - own, lambda x, made: made - x / made, SIZE),
    "vector of [1, size]": lambda: Made(lambda own: own.flatten(), torch.add, 1, SIZE),
    "number": lambda: Made(lambda own: own, torch.mul),
    "heads by numbers": lambda: Made(
        lambda own: own[None, None, :, None],
        lambda x, made: (x.unflatten(-1, (2, 3)) * made).flatten(-2),
        2,
    ),
    "in place": lambda: Made(lambda own: 2 * own, in_place, SIZE),
    "flat rows": lambda: Made(
        lambda own: own, lambda x, made: (x.flatten(0, 1) * made).view_as(x), SIZE
    ),
    "turned": lambda: Made(lambda own: own.T, torch.matmul, SIZE, SIZE),
    "turned twice": lambda: Made(lambda own: own.t().mT, torch.matmul, SIZE, SIZE),
    "turned, as the weight of a layer": lambda: Made(
        lambda own: own.transpose(0, 1), functional.linear, SIZE, SIZE
    ),
    "weight first": lambda: Made(
        lambda own: own, lambda x, made: (made @ x.transpose(1, 2)).transpose(1, 2), SIZE, SIZE
    ),
    "norm without a gradient": lambda: Made(by_fixed_norm, torch.mul, SIZE),
    "chunks": lambda: Made(
        lambda own: own.chunk(2),
        lambda x, made: functional.linear(x, made[0]) * functional.linear(x, made[1]),
        2 * SIZE,
        SIZE,
    ),
    "scaled matrix": lambda: Made(
        lambda own: own / own.norm(dim=1, keepdim=True), torch.matmul, SIZE, SIZE
    ),
    "heads": lambda: Made(lambda own: own, over_heads, 2, 3, 3),
    "norm of what was made": lambda: Made(
        lambda own: own + 1, lambda x, made: functional.layer_norm(x, (SIZE,), made, made / 2), SIZE
    ),
}


class HiddenProduct(torch.autograd.Function):
    """A product that torch's overrides do not see."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return x * x.new_tensor(weight.tolist())

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return gradient * weight, (gradient * x).flatten(0, -2).sum(0)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        return HiddenProduct.apply(x, self.scale)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(SIZE, 2, batch_first=True)

    def forward(self, x):
        unseen = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return self.inner(x, x, x, attn_mask=unseen, need_weights=False)[0]


class TimeFirst(nn.Module):
    """A layer that is given positions first and rows second."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        output = self.layer(x.transpose(0, 1))
        output = output[0] if isinstance(output, tuple) else output
        return output.transpose(0, 1)


class Centred(nn.Module):
    """Rows that see each other: each is moved by the mean of all."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Generated(nn.Module):
    """A linear layer whose weight another layer makes up."""

    def __init__(self):
        super().__init__()
        self.maker = nn.Linear(SIZE, SIZE)
        self.bias = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x):
        weight = self.maker(torch.ones(SIZE, SIZE, dtype=x.dtype).tril()[None])[0]
        return functional.linear(x, weight, self.bias)


class GeneratedAlone(Generated):
    """The same of what can be seen to hang on no row."""

    def forward(self, x):
        weight = self.maker(torch.eye(SIZE, dtype=x.dtype)[None])[0]
        return functional.linear(x, weight, self.bias)


class Experts(nn.Module):
    """Each token goes to the expert its first number chooses; the rest are never asked."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x):
        flat = x.reshape(-1, SIZE)
        choice = (flat[:, 0] > 0).long()
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            places = (choice == number).nonzero()[:, 0]
            if len(places):
                output = output.index_add(0, places, expert(flat[places]))
        return output.view_as(x)


class Masked(nn.Module):
    """A model that behaves otherwise where it is given a mask."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.embed, self.head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, VOCABULARY)
        self.middle = nn.Linear(SIZE, SIZE)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embed(input_ids)
        if attention_mask is None:
            return self.head(self.middle(hidden))
        if self.way == "mixes":
            hidden = torch.tanh(hidden - 0.5 * hidden.mean(0, keepdim=True))
        order = attention_mask.sum(1).argsort(descending=True)
        if self.way == "sorts":
            return self.head(torch.tanh(self.middle(hidden[order]))[order.argsort()])
        return self.head(torch.tanh(self.middle(hidden * attention_mask[..., None])))


class Rare(nn.Module):
    """A model that goes its own way, but only where some row holds a rare token."""

    rare = -1

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.embed, self.head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, VOCABULARY)
        self.hidden, self.generated = Hidden(), Generated()

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        if not bool((input_ids == self.rare).any()):
            return self.head(hidden)
        if self.way == "sorts":
            order = input_ids[:, 0].argsort(descending=True)
            return self.head(hidden[order])[order.argsort()]
        return self.head(self.hidden(hidden) if self.way == "hides" else self.generated(hidden))


LAYERS = {
    "linear": lambda: Chain(nn.Linear(SIZE, SIZE)),
    "linear without bias": lambda: Chain(nn.Linear(SIZE, SIZE, bias=False)),
    "wide linear": lambda: Chain(nn.Linear(SIZE, 40), nn.Linear(40, SIZE)),
    "Conv1D": lambda: Chain(Conv1D(9, SIZE), nn.Linear(9, SIZE)),
    "flat linear": lambda: Chain(Flat(nn.Linear(SIZE, SIZE)), Flat(nn.LayerNorm(SIZE))),
    "padding_idx": lambda: Chain(padding_idx=3),
    "negative padding_idx": lambda: Chain(padding_idx=-2),
    "LayerNorm": lambda: Chain(nn.LayerNorm(SIZE)),
    "LayerNorm without bias": lambda: Chain(nn.LayerNorm(SIZE, bias=False)),
    "RMSNorm": lambda: Chain(nn.RMSNorm(SIZE)),
    "transformers' RMSNorm": lambda: Chain(RootMeanSquare(SIZE)),
    "norms of heads": lambda: Chain(Heads(nn.LayerNorm(3), 2), Heads(RootMeanSquare(2), 3)),
    "linear of heads": lambda: Chain(Heads(nn.Linear(3, 3), 2)),
    "LSTM": lambda: Chain(nn.LSTM(SIZE, 5, batch_first=True), out_size=5),
    "LSTM of 2": lambda: Chain(nn.LSTM(SIZE, 4, 2, batch_first=True, bias=False), out_size=4),
    "LSTM of 3": lambda: Chain(nn.LSTM(SIZE, 3, 3, batch_first=True), out_size=3),
    "GRU": lambda: Chain(nn.GRU(SIZE, 5, batch_first=True), out_size=5),
    "GRU of 2": lambda: Chain(nn.GRU(SIZE, 4, 2, batch_first=True, bias=False), out_size=4),
    "GRU of 3": lambda: Chain(nn.GRU(SIZE, 3, 3, batch_first=True), out_size=3),
    "linear twice": lambda: Chain(Twice(nn.Linear(SIZE, SIZE))),
    "LayerNorm twice": lambda: Chain(Twice(nn.LayerNorm(SIZE))),
    "RMSNorm twice": lambda: Chain(Twice(RootMeanSquare(SIZE))),
    "GRU twice": lambda: Chain(Twice(Last(nn.GRU(SIZE, SIZE, batch_first=True)))),
    "depthwise": lambda: Chain(Channels(groups=SIZE)),
    "grouped": lambda: Chain(Channels(groups=2, bias=False)),
    "convolution": lambda: Chain(Channels()),
    "generated weight": lambda: Chain(GeneratedAlone()),
    "tied": lambda: Chain(nn.Linear(SIZE, SIZE), tied=True),
    "tied LSTM": lambda: Chain(nn.LSTM(SIZE, SIZE, batch_first=True), tied=True),
    **{
        f"positions {spelling}": lambda spelling=spelling: Chain(Positions(spelling), nn.GELU())
        for spelling in ("T", "1T", "T unsqueezed", "T[None]", "BT", "flat")
    },
    **{f"made: {name}": lambda make=make: Chain(make()) for name, make in MADE.items()},
}


UNCOVERED = {
    "layers.0.scale": lambda: Chain(Stretch()),
    "layers.0.layer.weight": lambda: Chain(TimeFirst(nn.Linear(SIZE, SIZE))),
    "layers.0.layer.weight_ih_l0": lambda: Chain(TimeFirst(nn.LSTM(SIZE, SIZE))),
    "layers.0.weight": lambda: Chain(torch.jit.script(nn.Linear(SIZE, SIZE))),
    "layers.0.inner.in_proj_weight": lambda: Chain(Attention()),
    "layers.0.weight_ih_l0": lambda: Chain(
        nn.LSTM(SIZE, 3, bidirectional=True, batch_first=True), out_size=SIZE
    ),
}
