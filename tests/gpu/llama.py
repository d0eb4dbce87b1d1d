"""A Llama-shaped model decodes through a daemon on a GPU, beside attention in this process.

A model of random weights (16 layers, 32 query and 8 kv heads of 128) reads a prompt of 4,096 random
tokens with transformers. Its keys and values go to a daemon as BF16; then tokens are decoded
greedily twice. The reference computes attention in this process in float32 from the same BF16 keys
and values and chooses the tokens; the second run is given the same tokens and asks the daemon for
each layer's attention. Wherever the reference's two best logits differ by more than 0.01 the second
run must choose the same token. The largest difference of a logit is printed.

    python tests/gpu/llama.py --sluiced gpu-package/sluiced [--device cpu] [--tokens 64]

Needs torch and transformers. Exit status: 0 if the tokens are the same, 1 if not.
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


def make_model(arguments, where):
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
    # Random weights attend to everything alike; larger ones choose, as trained ones do.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 3
            layer.self_attn.k_proj.weight *= 3
    return model


def bf16(tensor):
    """A tensor's values as BF16, in numpy."""
    bits = tensor.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy()
    return bits.view(ml_dtypes.bfloat16)


class InProcess:
    """Float32 attention over BF16 keys and values, [tokens, kv_heads, head_dim] a layer."""

    def __init__(self, keys, values):
        self.keys = [k.to(torch.bfloat16).float() for k in keys]
        self.values = [v.to(torch.bfloat16).float() for v in values]

    def __call__(self, layer, q, k, v):
        self.keys[layer] = torch.cat([self.keys[layer], k.to(torch.bfloat16).float()[None]])
        self.values[layer] = torch.cat([self.values[layer], v.to(torch.bfloat16).float()[None]])
        num_kv_heads, head_dim = k.shape
        q = q.to(torch.bfloat16).float().view(num_kv_heads, -1, head_dim)
        logits = torch.einsum("hgd,thd->hgt", q, self.keys[layer]) * head_dim**-0.5
        out = torch.einsum("hgt,thd->hgd", logits.softmax(-1), self.values[layer])
        return out.reshape(-1, head_dim)


class Remote:
    """One session with one sequence; each call is one DecodeStep."""

    def __init__(self, session, keys, values, max_blocks):
        self.session = session
        self.tokens = len(keys[0])
        self.steps_s = []
        self.stats = None
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
        begin = time.perf_counter()
        step = self.session.decode_step(
            layer,
            [sluice_client.DecodeSequence(0, self.layer_tokens[layer])],
            bf16(q)[np.newaxis],
            bf16(k)[np.newaxis],
            bf16(v)[np.newaxis],
            out_dtype=np.float32,
        )
        self.steps_s.append(time.perf_counter() - begin)
        self.stats = step.stats
        return torch.from_numpy(np.array(step.out[0])).to(q.device)


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


def main():
    arguments = parse_arguments()
    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model(arguments, where)
    generator = torch.Generator().manual_seed(arguments.seed)
    prompt = torch.randint(0, 8192, (1, arguments.prompt), generator=generator).to(where)
    with torch.no_grad():
        # The last prompt token is decoded, so that both runs begin alike.
        past = model(prompt[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    keys = [layer.keys[0].transpose(0, 1).contiguous() for layer in past.layers]
    values = [layer.values[0].transpose(0, 1).contiguous() for layer in past.layers]

    with tempfile.TemporaryDirectory() as folder:
        daemon, address = start_daemon(arguments, pathlib.Path(folder))
        try:
            with sluice_client.Client(address) as client:
                max_blocks = -(-(arguments.prompt + arguments.tokens) // BLOCK_TOKENS)
                session = client.open_session(
                    name="llama", num_layers=arguments.layers, num_query_heads=32, num_kv_heads=8,
                    head_dim=128, block_tokens=BLOCK_TOKENS, rank=32, max_blocks=max_blocks, max_sequences=1,
                )
                remote = Remote(session, keys, values, max_blocks)
                status = compare(arguments, model, prompt, keys, values, remote)
        finally:
            daemon.terminate()
            daemon.wait()
    sys.exit(status)


def compare(arguments, model, prompt, keys, values, remote):
    here = Decoder(model, InProcess(keys, values), arguments.prompt - 1)
    there = Decoder(model, remote, arguments.prompt - 1)
    token = int(prompt[0, -1])
    same = differ = close = 0
    largest = 0.0
    smallest_gap = np.inf
    chosen = []
    for _ in range(arguments.tokens):
        expected, got = here(token), there(token)
        largest = max(largest, float(np.abs(expected - got).max()))
        second, first = np.sort(expected)[-2:]
        token = int(expected.argmax())
        chosen.append(token)
        if first - second <= GAP:
            close += 1
            continue
        smallest_gap = min(smallest_gap, first - second)
        if int(got.argmax()) == token:
            same += 1
        else:
            differ += 1
    stats = remote.stats
    print(f"tokens the same: {same} of {same + differ} ({close} more with logits within {GAP}); {len(set(chosen))} different ones")
    print(f"largest difference of a logit: {largest:.2e}; smallest gap compared: {smallest_gap:.3f}")
    print(
        f"p50 of a DecodeStep, one layer: {np.median(remote.steps_s) * 1e6:.0f} us; "
        f"the last read {stats.hbm_blocks} blocks in HBM and {stats.host_blocks} in host memory"
    )
    return 0 if differ == 0 and same > 0 else 1


if __name__ == "__main__":
    main()
