"""What a site asks of every model that the server sends, before it trains or scores with it.

judge       the door: `BaseJudge.judge` decides by what was sent, `judge_by_images` by the site's own images
statistics  a model's numbers: finite, of the first model, of its structure, of how far it moved
responses   how units answer to images
"""
