-- Decides a batch as apply.lua does, with three commands, while nobody waits and all of the state is in one field (quiet, see there).
-- What it does not know, or is unusual, it leaves as it is, for apply.lua.
--
-- KEYS      state
-- ARGV      process, '<dddddddd' of deadline (0: none), lease, patience, permits, version that the process knows of, and the numbers of
--           what follows: ids to leave, ids to renew, and entries of id, permits (below 0: it does not wait), label
-- returns   nothing, or '<ddddddd' of now, fresh, permits, earliest, told, limit, version; the standings, what was renewed, and
--           of each entry outcome and fence

local call, pack, unpack, process = redis.call, struct.pack, struct.unpack, ARGV[1]
local deadline, lease, patience, permits, version, leaves, renews, enters = unpack('<dddddddd', ARGV[2])
local t = call('TIME')
local now = t[1] * 1000000 + t[2]
local text = call('HGET', KEYS[1], 'quiet')
if not text or #text < 64 or #text > 4096 or deadline ~= 0 and now > deadline then return {} end
local limit, newest, lives, ticket, fence, seen, used, first = unpack('<dddddddd', text)
if not (version <= newest and seen <= now and lives - now >= 86400000000 and fence < 9007199254740992 and
  (used == 0 or used > 0 and first > now)) then return {} end
local total, rest, reply, n, at = limit == 0 and permits or limit, text:sub(65), {''}, 1, 2
local REFUSED, GRANTED, TOO_MANY, GONE, HOLDING = 0, 2, 3, 0, 2

local changed = false -- a lease that may have been the first to end
local cut = false -- there is less than there should be
local function numbers(b) -- the last byte before those of a holder whose id ends there
  b = rest:find('\0', b + 1, true)
  if b and #rest >= b + 32 then return b end
  cut = true
end
local function find(id) -- the first byte of a holder, and the last before its numbers
  local a, b = rest:find('\nholder ' .. id .. '\0', 1, true)
  return a, a and numbers(b)
end
local function renew(b)
  local ends = now + lease
  if unpack('<d', rest, b + 9) < ends then
    rest, changed = rest:sub(1, b + 8) .. pack('<d', ends) .. rest:sub(b + 17), true
  end
end

local fresh, told = 1, 0
if rest ~= '' then
  local a, b = rest:find('\nprocess ' .. process .. '\0', 1, true)
  if a then
    if #rest < b + 16 then return {} end
    fresh, told = 0, unpack('<d', rest, b + 9)
    rest = rest:sub(1, a - 1) .. rest:sub(b + 17)
  end
  if now % 256 == 0 and rest:find('\nprocess ', 1, true) then return {} end -- some may have died long ago: apply.lua forgets them
end

for _ = 1, leaves do
  at, n = at + 1, n + 1
  local a, b = find(ARGV[at])
  reply[n] = GONE
  if b then
    local size, expires = unpack('<dd', rest, b + 1)
    rest, used, reply[n] = rest:sub(1, a - 1) .. rest:sub(b + 33), used - size, HOLDING
    changed = changed or expires == first
  end
end

for _ = 1, renews do
  at, n = at + 1, n + 1
  local _, b = find(ARGV[at])
  reply[n] = b and 1 or 0
  if b then renew(b) end
end

for _ = 1, enters do
  local id, size, label, b = ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3], nil
  local wait = size > 0
  at, n, size = at + 3, n + 2, wait and size or -size
  if used > 0 then b = select(2, find(id)) end
  reply[n - 1], reply[n] = REFUSED, 0
  if b then -- granted before; its answer was lost
    renew(b)
    reply[n - 1], reply[n] = GRANTED, unpack('<d', rest, b + 17)
  elseif size > total then
    reply[n - 1] = TOO_MANY
  elseif used + size <= total then
    local ends = now + lease
    fence = fence < now and now or fence + 1
    rest = pack('<c0c0c0c0c0dddd', rest, '\nholder ', id, '\0', label .. '\0', size, ends, fence, now)
    if used == 0 or ends < first then first = ends end
    used, reply[n - 1], reply[n] = used + size, GRANTED, fence
  elseif wait then
    return {} -- it queues up
  end
end

if used == 0 then
  first = 0
elseif changed then
  first = math.huge
  local _, b = rest:find('\nholder ', 1, true)
  while b do
    b = rest:find('\0', b + 1, true)
    b = b and numbers(b)
    if not b then return {} end
    first = math.min(first, (unpack('<d', rest, b + 9)))
    _, b = rest:find('\nholder ', b + 33, true)
  end
end
if cut then return {} end
if patience > 0 then rest = pack('<c0c0c0dd', '\nprocess ', process, '\0', now + patience, told) .. rest end
call('HSET', KEYS[1], 'quiet', pack('<ddddddddc0', limit, newest, lives, ticket, fence, now, used, first, rest))
reply[1] = pack('<ddddddd', now, fresh, total, first, told, limit, newest)
return reply
