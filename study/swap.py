"""
Order or knowledge? One of base and adapter chooses the positions, the other their tokens.

$ python study/swap.py --model M --adapter NAME=DIR --prompts test.jsonl --parallel 2 4 --out results

If an adapter's tokens are as good as the base's in the base's order, and not in its own, training has spoiled the order
and nothing else. Like eval.py it writes OUT/NAME.json, here accuracies only, and measures nothing again that is there.
"""
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
import lora  # noqa: E402
from decode import decode_all, decoding_flags  # noqa: E402
from eval import accuracy, find_todo, read_domains, read_speeds, save_result  # noqa: E402
from model import load_model, load_tokenizer, read_config  # noqa: E402
from util import Parser, count, init_process_group, setup_device, stop  # noqa: E402


def flags():
    """Like those of eval.py, which knows the defaults of settings that an older result does not name."""
    parser = Parser(__doc__, parents=[decoding_flags()])
    flag = parser.add_argument
    flag("--model", required=True, help="hub name or folder")
    flag("--adapter", nargs="*", default=[], help="adapter folders, DIR or NAME=DIR")
    flag("--no-base", action="store_true", help="do not measure the model without an adapter, for comparison")
    flag("--prompts", nargs="+", required=True, help="prompts with answers; a file's stem names the domain")
    flag("--limit", type=count, default=0, help="only the first prompts of each file")
    flag("--parallel", type=count, nargs="+", default=[], help="at these numbers of tokens per step")
    flag("--out", default="results", help="folder for the results")
    flag("--batch-size", type=int, default=16, help="prompts per forward")
    flag("--dtype", choices=["bf16", "fp32"], help="of the weights (default: bf16 if the GPU has it, else fp32)")
    return parser


def parse_args(argv=None):
    args = flags().parse_args(argv)
    if args.suppress_eos or args.ties == "position":
        stop("--suppress-eos, --ties position: a swap exchanges the logits of two tokens, and the scores of these two "
             "flags would notice; leave them out")
    return args


class Swapped(torch.nn.Module):
    """
    The logits are those of the one that chooses, but its most probable token and the other's have changed places: a
    score cannot tell tokens apart, and greedy decoding takes the most probable one.
    """
    def __init__(self, model, base_chooses: bool):
        super().__init__()
        self.model, self.base_chooses = model, base_chooses

    def forward(self, *batch):
        logits = self.model(*batch)                                                          # (B, n, V)
        with lora.disabled(self.model):
            others = self.model(*batch)
        if self.base_chooses:
            logits, others = others, logits
        logits = logits.float()
        mask = torch.tensor([self.model.config.mask_id], device=logits.device)               # is never a token
        top, own = logits.index_fill(-1, mask, -torch.inf).max(-1, keepdim=True)             # (B, n, 1)
        other = others.index_fill(-1, mask, -torch.inf).argmax(-1, keepdim=True)             # (B, n, 1)
        logits.scatter_(-1, own, logits.gather(-1, other))
        # a little more than the top: in bf16 the two largest logits are often equal
        return logits.scatter_(-1, other, top + 1e-5)


def main():
    args = parse_args()
    rank, world_size, device, dtype = setup_device(args.dtype)
    if world_size > 1:
        init_process_group("cpu", minutes=60)
    todo = find_todo(args, args.prompts)
    if not todo:
        return

    config = read_config(args.model)
    tok = load_tokenizer(config)
    speeds = read_speeds(args, config, tok.end_ids)
    for s in speeds.values():
        if s.temperature > 0 and not s.greedy:
            stop(f"--model {args.model}: the temperature is {s.temperature:g}, but a swap takes the most probable "
                 f"tokens; add --greedy")
    domains = read_domains(args)

    model = load_model(config, device, dtype)
    for name, about in todo.items():
        if about["adapter"]:
            lora.load(model, about["adapter"])
        measured = {"accuracy": {}, "swap": {}}
        for domain, items in domains.items():
            for label, s in speeds.items():
                key = f"{domain}/{label}"

                def answer(network):
                    trajs = decode_all(network, tok, config, items, s, args.batch_size, f"{name} {key}")
                    return accuracy(trajs)

                measured["accuracy"][key] = answer(model)
                if about["adapter"]:
                    measured["swap"][key] = {
                        "adapter's tokens, base's order": answer(Swapped(model, base_chooses=True)),
                        "base's tokens, adapter's order": answer(Swapped(model, base_chooses=False))}
        if rank == 0:
            save_result(args, about, measured)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
