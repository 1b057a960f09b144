"""Prune a small vision transformer on handwritten digits with the Trainer of Hugging Face.

pip install "polarprune[transformers]" scikit-learn
python examples/transformers_digits.py
"""

import torch
from sklearn.datasets import load_digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

import polarprune as pp
from polarprune.integrations.transformers import PruningTrainer


def make_model():
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=128, num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config)


def main(epochs=20):
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = [
        {"pixel_values": image, "labels": int(label)}
        for image, label in zip(images, digits.target, strict=True)
    ]
    args = TrainingArguments(
        "runs/digits",
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,  # the best of those that meet the budget
        report_to="none",
        use_cpu=True,
    )
    trainer = PruningTrainer(
        make_model(),
        args,
        train_dataset=data[:-400],
        eval_dataset=data[-400:],
        pruning={"macs": 0.5, "norms": True},
    )
    trainer.train()  # trainer.train(resume_from_checkpoint=True) resumes
    small = trainer.export().eval()
    print(trainer.pruner.report())
    with torch.no_grad():
        hits = small(images[-400:]).logits.argmax(1) == torch.tensor(digits.target[-400:])
    print(f"accuracy {hits.float().mean():.1%}")
    pp.save(small, "small.safetensors")  # pp.load("small.safetensors", model=make_model())


if __name__ == "__main__":
    main()
