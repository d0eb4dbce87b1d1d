"""A Llama-shaped model decodes through a daemon on a GPU, beside attention in this process.

A model of random weights (16 layers, 32 query and 8 kv heads of 128) reads a prompt of 4,096 random
tokens with transformers. Its keys and values go to a daemon as BF16; then tokens are decoded
greedily twice. The reference computes attention in this process in float32 from the same BF16 keys
and values and chooses the tokens; the second run is given the same tokens and asks the daemon for
each layer's attention. Wherever the reference's two best logits differ by more than 0.01 the second
run must choose the same token. The largest difference of a logit is printed.

Random weights attend to all tokens alike. So the same is done with q and k made three times as
large, where attention chooses. There the two runs soon differ by what BF16 rounds, whoever computes;
so each output of the daemon is also held against float64 attention over the very q, k and v that it
was given, and must be within 1e-3 of it.

    python tests/gpu/llama.py --sluiced gpu-package/sluiced [--device cpu] [--tokens 64]

Needs torch and transformers. Exit status: 0 if tokens and outputs are as they must be, 1 if not.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python"))
import sluice_client  # noqa: E402

BLOCK_TOKENS = 16
GAP = 0.01
TOLERANCE = 1e-3
START_S = 120


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluiced", required=True)
    parser.add_argument("--device", default="cuda", help="the daemon's --device")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(arguments, where, sharpness):
    torch.manual_seed(arguments.seed)
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=4096,
        num_hidden_layers=arguments.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=8192,
        max_position_embeddings=arguments.prompt + arguments.tokens + 1,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).to(where, torch.float32).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= sharpness
            layer.self_attn.k_proj.weight *= sharpness
    return model


def bf16(tensor):
    """A tensor's values as BF16, in numpy."""
    bits = tensor.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy()
    return bits.view(ml_dtypes.bfloat16)


class InProcess:
    """Attention over BF16 keys and values, [tokens, kv_heads, head_dim] a layer."""

    def __init__(self, keys, values, dtype=torch.float32):
        self.dtype = dtype
        self.keys = [self._round(k) for k in keys]
        self.values = [self._round(v) for v in values]

    def _round(self, tensor):
        return tensor.to(torch.bfloat16).to(self.dtype)

    def __call__(self, layer, q, k, v):
        self.keys[layer] = torch.cat([self.keys[layer], self._round(k)[None]])
        self.values[layer] = torch.cat([self.values[layer], self._round(v)[None]])
        num_kv_heads, head_dim = k.shape
        q = self._round(q).view(num_kv_heads, -1, head_dim)
        logits = torch.einsum("hgd,thd->hgt", q, self.keys[layer]) * head_dim**-0.5
        out = torch.einsum("hgt,thd->hgd", logits.softmax(-1), self.values[layer])
        return out.reshape(-1, head_dim)


class Remote:
    """One session with one sequence; each call is one DecodeStep, held against float64."""

    def __init__(self, session, keys, values, max_blocks):
        self.session = session
        self.tokens = len(keys[0])
        self.steps_s = []
        self.stats = None
        self.exact = InProcess(keys, values, torch.float64)
        self.largest_error = 0.0
        num_blocks = -(-self.tokens // BLOCK_TOKENS)
        valid = [min(BLOCK_TOKENS, self.tokens - b * BLOCK_TOKENS) for b in range(num_blocks)]
        # Ids in no order.
        self.ids = np.random.default_rng(1).permutation(max_blocks)
        for layer, (k, v) in enumerate(zip(keys, values)):
            session.offload_blocks(
                layer,
                self.ids[:num_blocks].tolist(),
                self._in_blocks(k, num_blocks),
                self._in_blocks(v, num_blocks),
                valid_tokens=valid,
            )
        session.put_sequence(0, 1, self.ids.tolist())
        self.layer_tokens = [self.tokens] * len(keys)

    @staticmethod
    def _in_blocks(tensor, num_blocks):
        tokens = bf16(tensor)
        blocks = np.zeros((num_blocks * BLOCK_TOKENS, *tokens.shape[1:]), tokens.dtype)
        blocks[: len(tokens)] = tokens
        return blocks.reshape(num_blocks, BLOCK_TOKENS, *tokens.shape[1:])

    def __call__(self, layer, q, k, v):
        self.layer_tokens[layer] += 1
        rows = [bf16(tensor)[np.newaxis] for tensor in (q, k, v)]
        begin = time.perf_counter()
        step = self.session.decode_step(
            layer,
            [sluice_client.DecodeSequence(0, self.layer_tokens[layer])],
            *rows,
            out_dtype=np.float32,
        )
        self.steps_s.append(time.perf_counter() - begin)
        self.stats = step.stats
        out = torch.from_numpy(np.array(step.out[0])).to(q.device)
        error = (out.double() - self.exact(layer, q, k, v)).abs().max()
        self.largest_error = max(self.largest_error, float(error))
        return out


class Decoder:
    """The model one token at a time, its attention computed by `attention(layer, q, k, v)`."""

    def __init__(self, model, attention, position):
        self.model = model
        self.attention = attention
        self.position = position

    @torch.no_grad()
    def __call__(self, token):
        core = self.model.model
        where = core.embed_tokens.weight.device
        hidden = core.embed_tokens(torch.tensor([[token]], device=where))
        position = torch.tensor([[self.position]], device=where)
        cos, sin = core.rotary_emb(hidden, position)
        for index, layer in enumerate(core.layers):
            attention = layer.self_attn
            x = layer.input_layernorm(hidden)
            q = attention.q_proj(x).view(1, 1, -1, 128).transpose(1, 2)
            k = attention.k_proj(x).view(1, 1, -1, 128).transpose(1, 2)
            v = attention.v_proj(x).view(1, 1, -1, 128)
            q, k = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
            out = self.attention(index, q[0, :, 0], k[0, :, 0], v[0, 0])
            hidden = hidden + attention.o_proj(out.reshape(1, 1, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.position += 1
        return self.model.lm_head(core.norm(hidden))[0, 0].float().cpu().numpy()


def start_daemon(arguments, folder):
    port_file = folder / "port"
    process = subprocess.Popen(
        [
            arguments.sluiced,
            f"--device={arguments.device}",
            "--listen_address=127.0.0.1:0",
            f"--port_file={port_file}",
            "--unix_socket=",
            f"--hbm_budget_bytes={8 << 30}",
            f"--host_budget_bytes={1 << 30}",
        ]
    )
    deadline = time.monotonic() + START_S
    while not (port_file.exists() and port_file.read_text().strip()):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit("sluiced did not start")
        time.sleep(0.05)
    return process, f"127.0.0.1:{port_file.read_text().strip()}"


def run(arguments, where, sharpness, client):
    """Both runs with one model; whether they agree."""
    model = make_model(arguments, where, sharpness)
    generator = torch.Generator().manual_seed(arguments.seed)
    prompt = torch.randint(0, 8192, (1, arguments.prompt), generator=generator).to(where)
    with torch.no_grad():
        # The last prompt token is decoded, so that both runs begin alike.
        past = model(prompt[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    keys = [layer.keys[0].transpose(0, 1).contiguous() for layer in past.layers]
    values = [layer.values[0].transpose(0, 1).contiguous() for layer in past.layers]
    max_blocks = -(-(arguments.prompt + arguments.tokens) // BLOCK_TOKENS)
    session = client.open_session(
        name=f"llama-{sharpness}", num_layers=arguments.layers, num_query_heads=32, num_kv_heads=8,
        head_dim=128, block_tokens=BLOCK_TOKENS, rank=32, max_blocks=max_blocks, max_sequences=1,
    )
    remote = Remote(session, keys, values, max_blocks)
    here = Decoder(model, InProcess(keys, values), arguments.prompt - 1)
    there = Decoder(model, remote, arguments.prompt - 1)
    token = int(prompt[0, -1])
    same = compared = 0
    largest = 0.0
    smallest_gap = np.inf
    chosen = set()
    for _ in range(arguments.tokens):
        expected, got = here(token), there(token)
        largest = max(largest, float(np.abs(expected - got).max()))
        second, first = np.sort(expected)[-2:]
        token = int(expected.argmax())
        chosen.add(token)
        if first - second <= GAP:
            continue
        smallest_gap = min(smallest_gap, first - second)
        compared += 1
        same += int(got.argmax()) == token
    session.close(sluice_client.CloseMode.DELETE_DATA)
    stats = remote.stats
    print(f"q and k times {sharpness}")
    print(f"  tokens the same: {same} of {compared}, and {arguments.tokens - compared} with logits within {GAP}; {len(chosen)} different ones")
    print(f"  largest difference of a logit: {largest:.2e}; smallest gap compared: {smallest_gap:.3f}")
    print(f"  largest error of an output, against float64 over the same q, k and v: {remote.largest_error:.2e}")
    print(
        f"  p50 of a DecodeStep, one layer: {np.median(remote.steps_s) * 1e6:.0f} us; "
        f"the last read {stats.hbm_blocks} blocks in HBM and {stats.host_blocks} in host memory"
    )
    return (same == compared > 0 or sharpness > 1) and remote.largest_error <= TOLERANCE


def main():
    arguments = parse_arguments()
    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        daemon, address = start_daemon(arguments, pathlib.Path(folder))
        try:
            with sluice_client.Client(address) as client:
                agree = [run(arguments, where, sharpness, client) for sharpness in (1, 3)]
        finally:
            daemon.terminate()
            daemon.wait()
    sys.exit(0 if all(agree) else 1)


if __name__ == "__main__":
    main()
