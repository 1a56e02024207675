-- Decides one batch of one process on one semaphore: Backend.Apply of backend.go.
--
-- KEYS      all in one slot:
--   state   hash: fence, the highest handed out; ticket, likewise; used, permits that are held; seen, the latest time;
--           lives, until when all keys do; permits, if SetPermits has been called; solo, only while queue, procs and idle are
--           empty: 'earliest process until told', of the first expiry in held (0: none), and of the one process that procs would
--           have (-: none)
--   held    sorted set: id -> when its lease expires
--   info    hash: id -> 'permits process label' of waiters, 'permits process fence since label' of holders
--   queue   sorted set: id -> ticket, of who waits
--   procs   hash: process -> 'until told', of processes that wait
--   idle    hash: id -> process, of who waits until nobody holds anything
-- ARGV      process, label, lease, patience, permits, permits to set (0: none), deadline (0: none), channel prefix,
--           then counted lists: ids to leave; ids to renew; entries of id, permits, ticket, wait (0 or 1)
-- All times are microseconds of the server's clock (TIME, read once).
-- returns   'late now', or
--           'now fresh permits earliest told', the standings of leave, those of renew, the answers to enter as
--           'outcome fence ticket', and the grants as 'id outcome fence expires'

local state, held, info, queue, procs, idle = unpack(KEYS)
local process, label, lease, patience = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local permits, set, deadline, channel = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
local call, fmt = redis.call, string.format
local REFUSED, QUEUED, GRANTED, TOO_MANY = 0, 1, 2, 3
local GONE, WAITING, HOLDING = 0, 1, 2
local STANDSTILL, DAY = 2000000, 86400000000

local t = call('TIME')
local now = t[1] * 1000000 + t[2]
local int = function(n) return fmt('%.0f', n) end
if deadline ~= 0 and now > deadline then return {'late ' .. int(now)} end

local s = call('HMGET', state, 'fence', 'ticket', 'used', 'seen', 'permits', 'lives', 'solo')
local function whole(text) -- nothing else is ours: tonumber would take nan, inf and hexadecimal digits too
  local n = not text and 0 or text:find('^%d+$') and tonumber(text)
  return n and n <= 9007199254740992 and n
end
local fence, ticket, used, seen, stored, lives = whole(s[1]), whole(s[2]), whole(s[3]), whole(s[4]), whole(s[5]), whole(s[6])
local solo = s[7]
local first, who, till, told = (solo or '0 - 0 0'):match('^(%d+) (%S+) (%d+) (%d+)$')
if not (fence and ticket and used and seen and stored and lives and first) then return redis.error_reply('CORRUPT state') end

-- The acquire or release of a lone caller, when nobody waits: what follows below would decide the same with twice as many commands.
-- Whatever is unusual is left to that, before anything is written.
local enters = ARGV[9] == '0' and ARGV[10] == '0' and ARGV[11] == '1'
local leaves = ARGV[9] == '1' and ARGV[11] == '0' and ARGV[12] == '0'
if solo and (enters or leaves) and set == 0 and now >= seen and lives - now >= DAY then
  local earliest, total, at, answer = tonumber(first), stored == 0 and permits or stored, int(now), nil
  if (who == '-' or who == process) and (used == 0) == (earliest == 0) and (used == 0 or earliest > now) then
    if enters then
      local id, n, ends = ARGV[12], tonumber(ARGV[13]), int(now + lease)
      if n > 0 and used + n <= total and (used == 0 or call('ZCARD', held) > 0) and
        call('ZADD', held, 'NX', ends, id) == 1 then
        fence = math.max(fence + 1, now)
        local number = int(fence)
        call('HSET', info, id, fmt('%d %s %s %s %s', n, process, number, at, label))
        if used == 0 then
          local left = int((lives - now) / 1000)
          call('PEXPIRE', held, left)
          call('PEXPIRE', info, left)
        end
        if used == 0 or now + lease < earliest then first = ends end
        used, answer = used + n, '2 ' .. number .. ' 0' -- GRANTED
      end
    else
      local text = call('HGET', info, ARGV[10])
      local n = text and tonumber(text:match('^(%d+)'))
      if n and call('ZREM', held, ARGV[10]) == 1 then
        call('HDEL', info, ARGV[10])
        used, answer = math.max(0, used - n), '2' -- HOLDING
        first = used > 0 and int(call('ZRANGE', held, 0, 0, 'WITHSCORES')[2] or now) or '0'
      end
    end
  end
  if answer then
    solo = patience > 0 and fmt('%s %s %s %s', first, process, int(now + patience), told) or first .. ' - 0 0'
    call('HSET', state, 'fence', int(fence), 'used', int(used), 'seen', at, 'solo', solo)
    return {fmt('%s %d %s %s %s', at, who == process and 0 or 1, int(total), first, told), answer}
  end
end

local new = {} -- keys that may have been made by this call
if solo then
  call('HDEL', state, 'solo')
  if who ~= '-' then
    call('HSET', procs, who, till .. ' ' .. told)
    new[procs] = true
  end
end

-- The clock: up to two seconds behind the latest time seen it stands still; further behind it was set back.
if seen - now > STANDSTILL then
  local back = seen - now
  local all = call('ZRANGE', held, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do call('ZADD', held, int(all[i + 1] - back), all[i]) end
  local waiting = call('HGETALL', procs)
  for i = 1, #waiting, 2 do
    local till, count = waiting[i + 1]:match('^(%d+) (%d+)$')
    call('HSET', procs, waiting[i], int(till - back) .. ' ' .. count)
  end
elseif now < seen then
  now = seen
end

if set > 0 then call('HSET', state, 'permits', int(set)) end
local total = set > 0 and set or stored
if total == 0 then total = permits end

local messages = {} -- sent when all is written: should they be refused, what was decided holds all the same

local function about(id) -- permits, process, label of a waiter
  local text = call('HGET', info, id)
  if not text then return end
  local n, owner, rest = text:match('^(%d+) (%S+) ?(.*)$')
  return tonumber(n), owner, rest
end

local function finish(id, n) -- a holder
  call('ZREM', held, id)
  call('HDEL', info, id)
  used = math.max(0, used - n)
end

-- Redis may have evicted one of the keys: then what is held is counted anew.
if (used == 0) ~= (call('ZCARD', held) == 0) then
  used = 0
  for _, id in ipairs(call('ZRANGE', held, 0, -1)) do used = used + (about(id) or 1) end
end

-- Leases that have expired.
local expired = call('ZRANGEBYSCORE', held, '-inf', int(now))
for _, id in ipairs(expired) do finish(id, about(id) or 0) end

local at = 8
local function arg()
  at = at + 1
  return ARGV[at]
end

local left, renewed, entered, grants = {}, {}, {}, {}
for i = 1, tonumber(arg()) do
  local id, standing = arg(), GONE
  local n = about(id)
  if n then
    if call('ZSCORE', held, id) then
      finish(id, n)
      standing = HOLDING
    else
      call('ZREM', queue, id)
      call('HDEL', info, id)
      standing = WAITING
    end
  elseif call('HDEL', idle, id) == 1 then
    standing = WAITING
  end
  left[i] = standing
end

for i = 1, tonumber(arg()) do
  local id = arg()
  local score = call('ZSCORE', held, id)
  renewed[i] = score and 1 or 0
  if score and tonumber(score) < now + lease then call('ZADD', held, int(now + lease), id) end
end

-- The process, as one that waits.
local fresh = 0
told = 0
local known = call('HGET', procs, process)
if known then told = tonumber(known:match('^%d+ (%d+)')) else fresh = 1 end
local alive = {}
local function listens(owner)
  if owner == process then return patience > 0 end
  if alive[owner] == nil then
    local text = call('HGET', procs, owner)
    local till = text and tonumber(text:match('^(%d+)')) or 0
    alive[owner] = till >= now
    if text and till < now then call('HDEL', procs, owner) end
  end
  return alive[owner]
end

local function tell(id, owner, outcome, number, expires)
  local text = fmt('%s %d %s %s', id, outcome, int(number), int(expires))
  if owner == process then
    grants[#grants + 1] = text
    return
  end
  local till, count = call('HGET', procs, owner):match('^(%d+) (%d+)$')
  call('HSET', procs, owner, till .. ' ' .. int(count + 1))
  messages[#messages + 1] = {channel .. owner, text}
end

local function grant(id, n, owner, whose)
  fence = math.max(fence + 1, now)
  if used == 0 then new[held], new[info] = true, true end
  used = used + n
  call('ZADD', held, int(now + lease), id)
  call('HSET', info, id, fmt('%d %s %s %s %s', n, owner, int(fence), int(now), whose))
  return fence
end

-- Who waits for longest comes first, and nobody passes: who wants many is not starved.
local function admit()
  while true do
    local id = call('ZRANGE', queue, 0, 0)[1]
    if not id then break end
    local n, owner, whose = about(id)
    if not n or not listens(owner) then
      call('ZREM', queue, id)
      call('HDEL', info, id)
    elseif n > total then
      call('ZREM', queue, id)
      call('HDEL', info, id)
      tell(id, owner, TOO_MANY, 0, 0)
    elseif used + n <= total then
      call('ZREM', queue, id)
      tell(id, owner, GRANTED, grant(id, n, owner, whose), now + lease)
    else
      break
    end
  end
  if used == 0 then
    local all = call('HGETALL', idle)
    for i = 1, #all, 2 do
      if listens(all[i + 1]) then tell(all[i], all[i + 1], GRANTED, 0, 0) end
    end
    if #all > 0 then call('DEL', idle) end
  end
end
admit()

for i = 1, tonumber(arg()) do
  local id, n, old, wait = arg(), tonumber(arg()), tonumber(arg()), arg() == '1'
  local outcome, number, place = REFUSED, 0, 0
  local score = n > 0 and call('ZSCORE', held, id)
  if score then -- granted before; its answer was lost
    outcome, number = GRANTED, tonumber(call('HGET', info, id):match('^%d+ %S+ (%d+)'))
    if tonumber(score) < now + lease then call('ZADD', held, int(now + lease), id) end
  elseif n == 0 then
    outcome = used == 0 and GRANTED or QUEUED
    if used == 0 then
      call('HDEL', idle, id)
    else
      call('HSET', idle, id, process)
      new[idle] = true
    end
  elseif n > total then
    outcome = TOO_MANY
  else
    local waits = call('ZSCORE', queue, id)
    if waits then
      outcome, place = QUEUED, tonumber(waits)
    elseif used + n <= total and (call('ZCARD', queue) == 0 or old > 0 and old < tonumber(call('ZRANGE', queue, 0, 0, 'WITHSCORES')[2])) then
      outcome, number = GRANTED, grant(id, n, process, label)
    elseif wait then
      place = old
      if place == 0 then
        ticket = math.max(ticket + 1, now)
        place = ticket
      end
      ticket = math.max(ticket, place)
      if call('ZCARD', queue) == 0 then new[queue], new[info] = true, true end
      call('ZADD', queue, int(place), id)
      call('HSET', info, id, fmt('%d %s %s', n, process, label))
      outcome = QUEUED
    end
  end
  entered[i] = fmt('%d %s %s', outcome, int(number), int(place))
end

if patience > 0 then
  call('HSET', procs, process, int(now + patience) .. ' ' .. int(told))
  new[procs] = true
elseif known then
  call('HDEL', procs, process)
end
if lives - now < DAY then -- all live for another day at least
  lives = now + 2 * DAY
  for _, key in ipairs(KEYS) do new[key] = true end
end
call('HSET', state, 'fence', int(fence), 'ticket', int(ticket), 'used', int(used), 'seen', int(now), 'lives', int(lives))
for key in pairs(new) do call('PEXPIRE', key, int((lives - now) / 1000)) end
for _, m in ipairs(messages) do call('PUBLISH', m[1], m[2]) end

local next_ = call('ZRANGE', held, 0, 0, 'WITHSCORES')[2]
if patience == 0 and call('ZCARD', queue) == 0 and call('HLEN', procs) == 0 and call('HLEN', idle) == 0 then
  call('HSET', state, 'solo', (next_ and int(next_) or '0') .. ' - 0 0')
end
local reply = {fmt('%s %d %s %s %s', int(now), fresh, int(total), next_ and int(next_) or '0', int(told))}
for _, list in ipairs({left, renewed, entered, grants}) do
  for _, x in ipairs(list) do reply[#reply + 1] = tostring(x) end
end
return reply
