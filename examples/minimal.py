"""The module alone: jagged events in, pooled vectors out, one training step."""

import torch

import pma

torch.manual_seed(0)
pool = pma.PMA(embed_dim=128, num_heads=2, num_seeds=4)

events = torch.randn(700, 128, requires_grad=True)  # [T, E], the events of all segments one after the other
offsets = torch.tensor([0, 5, 5, 200, 700])  # [B+1], segment b is rows offsets[b] … offsets[b+1] − 1
pma.validate_offsets(offsets, total_rows=700)  # opt-in: reads the values, which the module itself never does

pooled = pool(events, offsets)  # [B, S, E]
print("pooled", tuple(pooled.shape), "| empty segment is zero:", bool((pooled[1] == 0).all()))

optimizer = torch.optim.Adam(pool.parameters(), lr=1e-3)
loss = pooled.square().mean()
loss.backward()
optimizer.step()
print(f"loss {loss.item():.4f} | gradient of events {tuple(events.grad.shape)}")
print("served by", pool.backend_report()["attention_forward"])
