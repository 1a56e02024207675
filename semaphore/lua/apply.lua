-- Decides one batch of one process on one semaphore: Store.Apply of package store.
--
-- KEYS      all in one slot. While it moves, only those that exist; they are known not to be at the server that the slot leaves:
--   state   hash: fence, the highest fence granted; ticket, the highest ticket; used, the number of permits held; seen, the latest time;
--           lives, until when all keys live; busy, when a request last waited; sift, the ticket from which on waiters may want more
--           permits than there are in all (missing if none does); permits, '3 limit version', where 3 is the format of the whole state
--           and a limit of 0 means the number of each request's process; quiet, which replaces everything else but permits, see below
--   held    sorted set: id -> when its lease expires
--   info    hash: id -> 'permits process lease own label' of waiters, where own is the number of its process,
--           'permits process fence since label' of holders
--   queue   sorted set: id -> ticket, of waiters
--   procs   hash: process -> 'until notified alive', of processes with waiters: until when the waiters stay, how many grants were
--           published to it, until when its waiters may be admitted
--   idle    hash: id -> process, of requests that wait until no permit is held
-- While no request has waited for a second, all is in the field quiet of state, and the other keys do not exist. quiet.lua then needs
-- three commands. The field is '<dddddddd' of limit, version, lives, ticket, fence, seen, used and the first expiry (0 if there is none);
-- '\nprocess ' process '\0' and '<dd' of until, notified; '\nholder ' id '\0' label '\0' and '<dddd' of permits, expires, fence, since.
-- The library struct encodes these numbers. A server without it, such as a stand-in for Redis in tests, keeps the state in all keys.
-- Each prefix begins with a byte that no number begins with, for the last byte of a number is '\0', '?' or '@' to 'C'; and no name
-- contains '\n' or '\0'.
-- In format 2 a field solo, 'earliest process until notified', replaced the one process in procs (- for none).
-- ARGV      process, label, lease, patience, alive, permits, the limit and the version that the process knows, permits to set
--           (0: none; -1: the number of each process), permits to add (0: none), deadline (0: none), channel prefix,
--           then counted lists: ids to leave; ids to renew; entries of id, permits, ticket, wait (0 or 1), label ('': the process's)
-- All times are microseconds of the server's clock (TIME, read once).
-- returns   'late now', or
--           'now fresh permits earliest notified limit version unchanged quiet unfinished', the standings of leave, the results of
--           renew, the results of enter as 'outcome fence ticket', and the grants as 'id outcome fence expires'. If unfinished is 1,
--           there are no results of enter: the script must run again for it. TRYAGAIN, if a key does not exist and cannot be made
--           here, since the slot moves away.

local state, held, info, queue, procs, idle = unpack(KEYS)
if #KEYS < 6 then
  local parts, declared = {'state', 'held', 'info', 'queue', 'procs', 'idle'}, {}
  for _, key in ipairs(KEYS) do declared[key] = true end
  for i, part in ipairs(parts) do
    parts[i] = KEYS[1]:gsub('%l+$', part)
    local found = declared[parts[i]] or redis.pcall((part == 'held' or part == 'queue') and 'ZCARD' or 'HLEN', parts[i])
    if type(found) == 'table' then
      if found.err:find('non local key', 1, true) then return redis.error_reply('TRYAGAIN a key is not here') end
      return found
    end
  end
  state, held, info, queue, procs, idle = unpack(parts)
end
local process, label, lease, patience = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local alive, permits, limit, version = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local set, add, deadline, channel = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), ARGV[12]
local call, fmt = redis.call, string.format
local REFUSED, QUEUED, GRANTED, TOO_MANY = '0', '1', '2', '3'
local GONE, WAITING, HOLDING = '0', '1', '2'
local DEAD, SILENT, ALIVE = 0, 1, 2
local MOST = 2147483648
local left = 500 -- waiters and expired leases that this call may still handle, so that it does not occupy the server for long
local STANDSTILL, SECOND, HOUR, DAY = 2000000, 1000000, 3600000000, 86400000000

local t = call('TIME')
local now = t[1] * 1000000 + t[2]
local texts = {} -- by number: formatting one costs as much as a command, and most occur often
local function int(n)
  local text = texts[-n] -- negative, because miniredis would fill an array of n slots: a lease has 10 million microseconds
  if not text then
    text = fmt('%.0f', n)
    texts[-n] = text
  end
  return text
end
if deadline ~= 0 and now > deadline then return {'late ' .. int(now)} end

local s = call('HMGET', state, 'fence', 'ticket', 'used', 'seen', 'permits', 'lives', 'busy', 'quiet', 'solo', 'sift')
local function whole(text) -- tonumber would accept nan, inf and hexadecimal digits too
  local n = not text and 0 or text:find('^%d+$') and tonumber(text)
  return n and n <= 9007199254740992 and n
end
local fence, ticket, used, seen, lives, busy = whole(s[1]), whole(s[2]), whole(s[3]), whole(s[4]), whole(s[6]), whole(s[7])
local format, limited, dated = (s[5] or not s[4] and '3 0 0' or ''):match('^([23]) (%d+) (%d+)$')
local stored, newest = whole(limited or ''), whole(dated or '')
local quiet, solo, sift = s[8] and parse(s[8]), nil, whole(s[10])
if quiet then -- and nothing else
  if s[1] or s[2] or s[3] or s[4] or s[6] or s[7] or format ~= '3' or stored ~= quiet.head[1] or newest ~= quiet.head[2] then quiet = nil end
end
if quiet then stored, newest, lives, ticket, fence, seen, used = unpack(quiet.head) end
if s[9] and format == '2' then solo = {s[9]:match('^%d+ (%S+) (%d+) (%d+)$')} end
if not (fence and ticket and used and seen and stored and newest and lives and busy and sift) or s[8] and not quiet or solo and not solo[1] then
  return redis.error_reply('CORRUPT state')
end

local new = {} -- keys that this call may have created
local function remember(who, till, notified)
  if who ~= process and till < now - HOUR then return end -- it was killed, and no later batch would remove it
  call('HSET', procs, who, fmt('%s %s %s', int(till), int(notified), int(till)))
  new[procs] = true
end
if quiet then
  for _, key in ipairs({held, info, queue, procs, idle}) do call('DEL', key) end -- pack.lua may have left some where the slot moves
  call('HDEL', state, 'quiet')
  for _, p in ipairs(quiet.processes) do remember(p[1], unpack(p.numbers)) end
  for _, h in ipairs(quiet.holders) do
    local n, expires, number, since = unpack(h.numbers)
    call('ZADD', held, int(expires), h[1])
    call('HSET', info, h[1], fmt('%d - %s %s %s', n, int(number), int(since), h[2]))
    new[held], new[info] = true, true
  end
elseif solo then
  call('HDEL', state, 'solo')
  if solo[1] ~= '-' then remember(solo[1], tonumber(solo[2]), tonumber(solo[3])) end
end

-- Up to two seconds behind the latest time seen, the clock stands still; further behind, it was set back.
if seen - now > STANDSTILL then
  local back = seen - now
  busy = math.min(busy, now)
  local all = call('ZRANGE', held, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do call('ZADD', held, int(all[i + 1] - back), all[i]) end
  local waiting = call('HGETALL', procs)
  for i = 1, #waiting, 2 do
    local till, count, awake = waiting[i + 1]:match('^(%d+) (%d+) (%d+)$')
    call('HSET', procs, waiting[i], fmt('%s %s %s', int(till - back), count, int(awake - back)))
  end
elseif now < seen then
  now = seen
end

-- The limit with the highest version is in force.
local changed, unchanged = version > newest, 0
if changed then stored, newest = limit, version end
if set ~= 0 or add ~= 0 then
  local n = set == 0 and (stored > 0 and stored or permits) + add or math.max(0, set)
  if set == 0 and (n < 1 or n > MOST) then
    unchanged = 1
  else
    stored, newest, changed = n, newest + 1, true
  end
end
if changed or not s[5] or format == '2' then call('HSET', state, 'permits', fmt('3 %s %s', int(stored), int(newest))) end
local total = stored > 0 and stored or permits

local messages = {} -- published when the state is written: if they fail, the decisions hold all the same

-- Writes are collected in lists, so that many ids share a command. write sends them, and must run before any of them is read.
local rows = {} -- of info, as far as they were read or written here; false if there is none
local enqueued, dequeued, granted, noted, forgotten = {}, {}, {}, {}, {}
local function send(command, key, list)
  for i = 1, #list, 1000 do call(command, key, unpack(list, i, math.min(i + 999, #list))) end
end
local function write()
  if dequeued[1] then send('ZREM', queue, dequeued); dequeued = {} end
  if forgotten[1] then send('HDEL', info, forgotten); forgotten = {} end
  if enqueued[1] then send('ZADD', queue, enqueued); enqueued = {} end
  if granted[1] then send('ZADD', held, granted); granted = {} end
  if noted[1] then send('HSET', info, noted); noted = {} end
end

-- Reads the rows of every step-th id in a list.
local function read(list, from, to, step)
  write()
  local ids = list
  if step > 1 then
    ids = {}
    for i = from, to, step do ids[#ids + 1] = list[i] end
    from, to = 1, #ids
  end
  for i = from, to, 1000 do
    for j, text in ipairs(call('HMGET', info, unpack(ids, i, math.min(i + 999, to)))) do rows[ids[i + j - 1]] = text end
  end
end

local function note(id, text)
  rows[id] = text
  noted[#noted + 1], noted[#noted + 2] = id, text
end

local function forget(id)
  rows[id] = false
  forgotten[#forgotten + 1] = id
end

local function size(id) -- permits of a waiter or a holder whose row was read
  return rows[id] and tonumber(rows[id]:match('^%d+'))
end

local function about(id) -- permits, process, lease, number of permits in force, and label of a waiter whose row was read
  if not rows[id] then return end
  local n, owner, lasts, own, rest = rows[id]:match('^(%d+) (%S+) (%d+) (%d+) ?(.*)$')
  return tonumber(n), owner, tonumber(lasts), stored > 0 and stored or tonumber(own), rest
end

-- Redis may have evicted one of the keys. Then used is counted again.
local earliest = call('ZRANGE', held, 0, 0, 'WITHSCORES')[2]
local function count()
  local all = call('ZRANGE', held, 0, -1)
  read(all, 1, #all, 1)
  local sum, unknown = 0, 0
  for _, id in ipairs(all) do
    if size(id) then sum = sum + size(id) else unknown = unknown + 1 end
  end
  return sum, unknown
end
if (used == 0) ~= not earliest then
  local sum, unknown = count()
  used = sum + unknown
end

if earliest and tonumber(earliest) <= now then -- leases that have expired
  local expired = call('ZRANGEBYSCORE', held, '-inf', int(now), 'LIMIT', 0, left)
  left = left - #expired
  read(expired, 1, #expired, 1)
  local known = true
  for _, id in ipairs(expired) do
    known = known and size(id)
    used = math.max(0, used - (size(id) or 1))
    forget(id)
  end
  send('ZREM', held, expired)
  if not known then -- the permits of unknown holders stay unknown until the last of them has expired
    local sum, unknown = count()
    used = unknown > 0 and math.max(used, sum + unknown) or sum
  end
end

local at = 12
local function arg()
  at = at + 1
  return ARGV[at]
end

local reply, grants = {''}, {} -- the first string is set at the end
local leaves, ended = tonumber(arg()), {}
read(ARGV, at + 1, at + leaves, 1)
for i = 1, leaves do
  local id, standing = arg(), GONE
  local n = size(id)
  if n then
    forget(id)
    if call('ZSCORE', held, id) then
      ended[#ended + 1] = id
      used = math.max(0, used - n)
      standing = HOLDING
    else
      dequeued[#dequeued + 1] = id
      standing = WAITING
    end
  elseif call('HDEL', idle, id) == 1 then
    standing = WAITING
  end
  reply[#reply + 1] = standing
end
-- A key that is made again is the newest, and servers that move the newest keys first would part it from the others. So held stays.
local stands = used == 0 and ended[1]
if stands then call('ZADD', held, int(now), '') end
send('ZREM', held, ended)
write()

for i = 1, tonumber(arg()) do
  local id = arg()
  local score = call('ZSCORE', held, id)
  reply[#reply + 1] = score and '1' or '0'
  if score and tonumber(score) < now + lease then call('ZADD', held, int(now + lease), id) end
end

-- The process as one with waiters.
local fresh, notified = 0, 0
local known = call('HGET', procs, process)
if known then notified = tonumber(known:match('^%d+ (%d+)')) else fresh = 1 end
if fresh == 1 and patience > 0 and now % 16 == 0 then -- now and then: remove processes that died
  local all = call('HGETALL', procs)
  for i = 1, #all, 2 do
    if tonumber(all[i + 1]:match('^%d+')) < now - HOUR then call('HDEL', procs, all[i]) end
  end
end
local others = {} -- processes that were looked up: till, notified, alive as in procs; is: the condition; changed: a grant was published
local function condition(owner)
  if owner == process then return patience > 0 and ALIVE or DEAD end
  local p = others[owner]
  if not p then
    local text = call('HGET', procs, owner)
    local till, count, awake = (text or '0 0 0'):match('^(%d+) (%d+) (%d+)$')
    p = {till = till, notified = tonumber(count), alive = awake}
    p.is = tonumber(till) < now and DEAD or tonumber(awake) < now and SILENT or ALIVE
    if text and p.is == DEAD then call('HDEL', procs, owner) end
    others[owner] = p
  end
  return p.is
end

local function notify(id, owner, outcome, number, expires)
  local text = id .. ' ' .. outcome .. ' ' .. int(number) .. ' ' .. int(expires)
  if owner == process then
    grants[#grants + 1] = text
    return
  end
  local p = others[owner]
  p.notified, p.changed = p.notified + 1, true
  messages[#messages + 1] = {channel .. owner, text}
end

local function grant(id, n, owner, lasts, whose)
  fence = math.max(fence + 1, now)
  if used == 0 then new[held], new[info] = true, true end
  used = used + n
  granted[#granted + 1], granted[#granted + 2] = int(now + lasts), id
  note(id, int(n) .. ' ' .. owner .. ' ' .. int(fence) .. ' ' .. int(now) .. ' ' .. whose)
  return fence
end

local function drop(id)
  dequeued[#dequeued + 1] = id
  forget(id)
end

local function dismiss(id, owner)
  drop(id)
  if condition(owner) ~= DEAD then notify(id, owner, TOO_MANY, 0, 0) end
end

-- After the limit has changed: waiters that can never be admitted are dismissed.
if changed then sift = 1 end
if sift > 0 then
  local all = call('ZRANGEBYSCORE', queue, int(sift), '+inf', 'WITHSCORES', 'LIMIT', 0, left)
  read(all, 1, #all, 2)
  sift = #all == 2 * left and #all > 0 and all[#all] + 1 or left == 0 and sift or 0
  left = left - #all / 2
  for i = 1, #all, 2 do
    local n, owner, _, there = about(all[i])
    if n and n > there then dismiss(all[i], owner) end
  end
  write()
end

-- Admits waiters in the order of their tickets. No waiter passes another, so that large requests do not starve. Returns whether any waiter
-- is left.
local function admit()
  while left > 0 do
    local most = math.min(256, left, math.max(0, total - used) + 1)
    local all = call('ZRANGE', queue, 0, most - 1)
    read(all, 1, #all, 1)
    for _, id in ipairs(all) do
      local n, owner, lasts, there, whose = about(id)
      if not n or condition(owner) == DEAD then
        drop(id)
      elseif n > there then
        dismiss(id, owner)
      elseif used + n <= there and condition(owner) == ALIVE then
        dequeued[#dequeued + 1] = id
        notify(id, owner, GRANTED, grant(id, n, owner, lasts, whose), now + lasts)
      else
        return true
      end
    end
    write()
    left = left - #all
    if #all < most then return false end
  end
  return true
end
local waiting = admit() -- whether any request waits
if used == 0 and left > 0 then
  local cursor, gone = '0', {}
  repeat
    local found = call('HSCAN', idle, cursor, 'COUNT', left)
    cursor, found = found[1], found[2]
    for i = 1, #found, 2 do
      if condition(found[i + 1]) ~= DEAD then notify(found[i], found[i + 1], GRANTED, 0, 0) end
      gone[#gone + 1] = found[i]
    end
  until cursor == '0' or #gone >= left
  if cursor ~= '0' then left = 0 end
  send('HDEL', idle, gone)
end
local unfinished = left == 0

local mine = ' ' .. process .. ' ' .. int(lease) .. ' ' .. int(permits) .. ' '
local function first() -- the ticket of the oldest waiter
  write()
  return tonumber(call('ZRANGE', queue, 0, 0, 'WITHSCORES')[2])
end

local enters = unfinished and 0 or tonumber(arg())
read(ARGV, at + 1, at + 5 * enters, 5)
for i = 1, enters do
  local id, n, old, wait, whose = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), ARGV[at + 4] == '1', ARGV[at + 5]
  at = at + 5
  if whose == '' then whose = label end
  local outcome, number, place = REFUSED, 0, 0
  local row = n > 0 and rows[id]
  if row then write() end
  local score = row and call('ZSCORE', held, id)
  if score then -- granted before, but the reply was lost
    outcome, number = GRANTED, tonumber(row:match('^%d+ %S+ (%d+)'))
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
    local waits = row and call('ZSCORE', queue, id)
    if waits then
      outcome, place = QUEUED, tonumber(waits)
    elseif used + n <= total and (not waiting or old > 0 and old < first()) then
      outcome, number = GRANTED, grant(id, n, process, lease, whose)
    elseif wait then
      place = old
      if place == 0 then
        ticket = math.max(ticket + 1, now)
        place = ticket
      end
      ticket = math.max(ticket, place)
      if not waiting then new[queue], new[info] = true, true end
      waiting = true
      enqueued[#enqueued + 1], enqueued[#enqueued + 2] = int(place), id
      note(id, int(n) .. mine .. whose)
      outcome = QUEUED
    end
  end
  reply[#reply + 1] = outcome .. ' ' .. int(number) .. ' ' .. int(place)
end
write()
if stands then call('ZREM', held, '') end

local waiters = {} -- fields of procs to write
for owner, p in pairs(others) do
  if p.changed then waiters[#waiters + 1], waiters[#waiters + 2] = owner, fmt('%s %s %s', p.till, int(p.notified), p.alive) end
end
if patience > 0 then
  waiters[#waiters + 1], waiters[#waiters + 2] = process, fmt('%s %s %s', int(now + patience), int(notified), int(now + alive))
  if not known then new[procs] = true end
elseif known then
  call('HDEL', procs, process)
end
send('HSET', procs, waiters)
if lives - now < DAY then -- all keys live for another day at least
  lives = now + 2 * DAY
  for _, key in ipairs({state, held, info, queue, procs, idle}) do new[key] = true end
end
local ends = call('ZRANGE', held, 0, 0, 'WITHSCORES')[2]
local first = ends and tonumber(ends) or 0

-- Returns the state as the field quiet; nil if a request waits or did so within a second, if the state is too large, or if a name cannot be
-- in the field.
local function packed()
  if not struct then return end
  if waiting or call('HLEN', idle) > 0 then busy = now end
  if now - busy <= SECOND then return end
  if call('ZCARD', held) > 64 or call('HLEN', procs) > 64 then return end
  local parts = {struct.pack('<dddddddd', stored, newest, lives, ticket, fence, now, used, first)}
  local function plain(name) return not (name:find('\n', 1, true) or name:find('\0', 1, true)) end
  local all = call('HGETALL', procs)
  for i = 1, #all, 2 do
    if not plain(all[i]) then return end
    parts[#parts + 1] = '\nprocess ' .. all[i] .. '\0' .. struct.pack('<dd', all[i + 1]:match('^(%d+) (%d+)'))
  end
  all = call('ZRANGE', held, 0, -1, 'WITHSCORES')
  local holders = {}
  for i = 1, #all, 2 do holders[#holders + 1] = all[i] end
  read(holders, 1, #holders, 1)
  for i = 1, #all, 2 do
    local n, number, since, whose = (rows[all[i]] or ''):match('^(%d+) %S+ (%d+) (%d+) (.*)$')
    if not n or not plain(all[i]) or not plain(whose) then return end
    parts[#parts + 1] = '\nholder ' .. all[i] .. '\0' .. whose .. '\0' .. struct.pack('<dddd', n, all[i + 1], number, since)
  end
  local text = table.concat(parts)
  return #text <= 8192 and text
end

local text = packed()
if text then
  for _, key in ipairs({held, info, procs}) do call('DEL', key) end -- together they are refused while the slot moves and one is missing
  call('HDEL', state, 'fence', 'ticket', 'used', 'seen', 'lives', 'busy', 'sift')
  call('HSET', state, 'quiet', text)
else
  call('HSET', state, 'fence', int(fence), 'ticket', int(ticket), 'used', int(used), 'seen', int(now), 'lives', int(lives),
    'busy', int(busy))
  if sift > 0 then call('HSET', state, 'sift', int(sift)) elseif s[10] then call('HDEL', state, 'sift') end
end
for key in pairs(new) do
  if key == state or not text then call('PEXPIRE', key, int((lives - now) / 1000)) end
end
for _, m in ipairs(messages) do call('PUBLISH', m[1], m[2]) end

reply[1] = table.concat({int(now), int(fresh), int(total), int(first), int(notified), int(stored), int(newest), int(unchanged),
  text and '1' or '0', unfinished and '1' or '0'}, ' ')
for _, g in ipairs(grants) do reply[#reply + 1] = g end
return reply
