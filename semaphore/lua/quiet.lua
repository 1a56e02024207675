-- Decides a batch as apply.lua does, with three commands, while no request waits and the whole state is in one field (quiet, see there).
-- It leaves unusual batches to apply.lua and changes nothing then. It has no functions and tables, for each would cost as much as a command.
--
-- KEYS      state
-- ARGV      process, '<dddddddd' of deadline (0: none), lease, patience (below 0: what cannot be granted waits in its process), permits, version
--           that the process knows, and the numbers of the following ids to leave, ids to renew, and entries of id, permits (below 0: it does
--           not wait), label
-- returns   nothing, or '<ddddddd' of now, fresh, permits, earliest, notified, limit, version; the standings of leave, the results of
--           renew, and outcome and fence of each entry

local call, pack, unpack, find, sub, process = redis.call, struct.pack, struct.unpack, string.find, string.sub, ARGV[1]
local deadline, lease, patience, permits, version, leaves, renews, enters = unpack('<dddddddd', ARGV[2])
local t = call('TIME')
local now = t[1] * 1000000 + t[2]
local text = call('HGET', KEYS[1], 'quiet')
if not text or #text < 64 or #text > 16384 or deadline ~= 0 and now > deadline then return {} end
local limit, newest, lives, ticket, fence, seen, used, first = unpack('<dddddddd', text)
if not (version <= newest and seen <= now and lives - now >= 86400000000 and fence < 9007199254740992 and
  (used == 0 or used > 0 and first > now)) then return {} end
local total, rest, ends = limit == 0 and permits or limit, sub(text, 65), now + lease
local reply, n, waiting, changed = {'', 0, 0}, 1, false, false -- changed: the lease that expires first may have changed

local fresh, notified, waits = 1, 0, ''
if rest ~= '' then
  local a, b = find(rest, '\nprocess ' .. process .. '\0', 1, true)
  if a then
    if #rest < b + 16 then return {} end
    fresh, notified = 0, unpack('<d', rest, b + 9)
    rest = sub(rest, 1, a - 1) .. sub(rest, b + 17)
  end
  if now % 256 == 0 and find(rest, '\nprocess ', 1, true) then return {} end -- now and then: apply.lua removes processes that died
end
if patience > 0 then waits = pack('<c0c0c0dd', '\nprocess ', process, '\0', now + patience, notified) end

for i = 3, leaves + 2 do
  local a, b = find(rest, '\nholder ' .. ARGV[i] .. '\0', 1, true)
  n = n + 1
  reply[n] = 0 -- GONE
  if a then
    b = find(rest, '\0', b + 1, true)
    if not b or #rest < b + 32 then return {} end
    local size, expires = unpack('<dd', rest, b + 1)
    rest, used, reply[n] = sub(rest, 1, a - 1) .. sub(rest, b + 33), used - size, 2 -- HOLDING
    changed = changed or expires == first
  end
end

for i = leaves + 3, leaves + renews + 2 do
  local a, b = find(rest, '\nholder ' .. ARGV[i] .. '\0', 1, true)
  n = n + 1
  reply[n] = a and 1 or 0
  if a then
    b = find(rest, '\0', b + 1, true)
    if not b or #rest < b + 32 then return {} end
    if unpack('<d', rest, b + 9) < ends then rest, changed = sub(rest, 1, b + 8) .. pack('<d', ends) .. sub(rest, b + 17), true end
  end
end

for i = leaves + renews + 3, leaves + renews + 3 * enters + 2, 3 do
  local id, size, outcome, number = ARGV[i], tonumber(ARGV[i + 1]), 0, 0 -- REFUSED
  local want = size < 0 and -size or size
  local _, b
  if used > 0 then _, b = find(rest, '\nholder ' .. id .. '\0', 1, true) end
  if b then -- granted before, but the reply was lost
    b = find(rest, '\0', b + 1, true)
    if not b or #rest < b + 32 then return {} end
    local _, expires, given = unpack('<ddd', rest, b + 1)
    outcome, number = 2, given
    if expires < ends then rest, changed = sub(rest, 1, b + 8) .. pack('<d', ends) .. sub(rest, b + 17), true end
  elseif want > total then
    outcome = 3 -- TOO_MANY
  elseif want == 0 then
    outcome = used == 0 and 2 or 1 -- QUEUED
  elseif used + want <= total and not waiting then
    fence = fence < now and now or fence + 1
    rest = rest .. '\nholder ' .. id .. '\0' .. ARGV[i + 2] .. '\0' .. pack('<dddd', want, ends, fence, now)
    if used == 0 or ends < first then first = ends end
    used, outcome, number = used + want, 2, fence -- GRANTED
  elseif size > 0 then
    if patience >= 0 then return {} end -- it enters the queue
    outcome, waiting = 1, true -- no later one passes it
  end
  reply[n + 1], reply[n + 2] = outcome, number
  n = n + 2
end

if used == 0 then
  first = 0
elseif changed then
  first = math.huge
  local _, b = find(rest, '\nholder ', 1, true)
  while b do
    b = find(rest, '\0', b + 1, true)
    b = b and find(rest, '\0', b + 1, true)
    if not b or #rest < b + 32 then return {} end
    local expires = unpack('<d', rest, b + 9)
    if expires < first then first = expires end
    _, b = find(rest, '\nholder ', b + 33, true)
  end
end
call('HSET', KEYS[1], 'quiet', pack('<dddddddd', limit, newest, lives, ticket, fence, now, used, first) .. waits .. rest)
reply[1] = pack('<ddddddd', now, fresh, total, first, notified, limit, newest)
for i = n + 1, 3 do reply[i] = nil end
return reply
