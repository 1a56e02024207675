// The screen Changes has nothing of its own: times are everybody's, and undo is an act.
export function start() {}
