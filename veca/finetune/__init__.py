"""`veca finetune`: train a model on labels (classes, masks or depth), for people without a Trainer."""
