// Package fleet shows all instances of a fleet as one. Each instance publishes the state of its limits to Redis every two
// seconds, in one small write. Any console reads what all of them have published, with a history of the last day.
//
// An instance has a Publisher, which reads a Source. A console has a Reader.
package fleet
