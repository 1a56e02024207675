package tokenbucket

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// slotMark surrounds the slot in the name of a bucket that has one. It is not valid UTF-8, so no other bucket has such a name.
const slotMark = "\xfe"

// maxSlotted bounds the bytes of a slot and a name together, so that no bucket's name in stores becomes longer than that of others.
const maxSlotted = 500

// WithSlot keeps the bucket in a slot of a Redis cluster, with all other buckets that have the same slot: all of them are on one server. A [Group] needs
// that to decide on them in one step. Default: each bucket has a slot by its name, so that buckets are spread over the servers.
//
// The bucket is then under another key ([RedisSlotKey]), in every store. Limiters of one name share a bucket only if they have the same slot or none.
// slot is 1 or more bytes of UTF-8, and has at most 500 bytes together with the name.
func WithSlot(slot string) Option {
	return func(o *options) {
		if slot == "" || !utf8.ValidString(slot) {
			o.fail("slot", fmt.Sprintf("%.40q", slot), "1 or more bytes of UTF-8")
		}
		o.slot = slot
	}
}

// slotted returns the name of a bucket in a slot; "" is no slot.
func slotted(slot, name string) string {
	if slot == "" {
		return name
	}
	return slotMark + slot + slotMark + name
}

// cutSlot returns the slot of a bucket's name, "" if it has none, and the rest of the name.
func cutSlot(name string) (slot, rest string) {
	if after, ok := strings.CutPrefix(name, slotMark); ok {
		slot, rest, _ = strings.Cut(after, slotMark)
		return slot, rest
	}
	return "", name
}

// RedisSlotKey returns the key that holds a bucket with a slot in Redis ([WithSlot]), as [RedisKey] does for a bucket without one.
func RedisSlotKey(keyPrefix, slot, name string) string {
	return keyPrefix + "{" + script.EncodeName(slot) + "}{" + script.EncodeName(name) + "}"
}

// slotName returns the name of a bucket in a slot as stores know it.
func slotName(slot, key string) string { return redisbucket.SlotKey(script.EncodeName(slot), key) }
