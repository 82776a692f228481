"""What `protofed new` writes: files whose names end in .tmpl, with $-placeholders, and who fills them in."""
