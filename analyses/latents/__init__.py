"""What the analyses of V1 latents are computed with: gate means by feature, intake by head, removal from one head."""
