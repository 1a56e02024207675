// What changes something: asked for by a button, confirmed in a dialog that names the consequence, and sent with the page's token.
export function bind() {}
