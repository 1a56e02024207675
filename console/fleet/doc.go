// Package fleet shows all instances of a fleet as one: each publishes every two seconds what its limits have come to, in one
// small write to Redis, and any console reads that of all of them, with a history of the last day.
//
// An instance has a Publisher, which asks a Source. A console has a Reader.
package fleet
