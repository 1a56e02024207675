-- Decides a batch on one bucket, in one step. It is PermitBucket.Apply of permit_state.go in Lua, equal to the last
-- bit: change both or none; TestDifferential compares them.
--
-- KEYS[1]  the bucket: a string, see permit_state.go
-- KEYS[2]  its lock: while somebody holds it, nothing is decided
-- ARGV[1]  now, in microseconds, or '' for the server's clock (TIME, read once)
-- ARGV[2]  deadline, in microseconds of the server's clock: run later, nothing is taken; '' for none
-- ARGV[3]  the lock's time to live in milliseconds; more than that remains only after the clock was set back
-- ARGV[4]  name of the next epoch, a random integer
-- ARGV[5]  the asking configuration as text; ARGV[6] the newest one known, or '' if that is the same
-- ARGV[7]  stored permits of a new bursty bucket
-- ARGV[8…] the requests:
--   T count permits maxWait   count equal requests, maxWait in microseconds
--   G epoch tag tail version id stored next carry end spent level granted   places given back
--   S rate                    set the rate
--   R                         begin anew
-- returns {0, now, old, new}: decided; old is the state before ('' if missing), new the one written ('' if none was)
--         {1, now}: too late;  {2, now, remaining}: locked for so many milliseconds;  {3, now, excerpt}: not a state

local MAX, SHORTFALL, STANDSTILL, MAX_RETURNED = 9007199254740992, 1e-9, 2000000, 32
local floor, ceil, min, max_, fmt = math.floor, math.ceil, math.min, math.max, string.format

local clock
if ARGV[1] ~= '' then
  clock = tonumber(ARGV[1])
else
  local t = redis.call('TIME')
  clock = t[1] * 1000000 + t[2]
end
local clock_text = fmt('%.0f', clock)
if ARGV[2] ~= '' and clock > tonumber(ARGV[2]) then return {1, clock_text} end

local held = redis.call('PTTL', KEYS[2])
if held ~= -2 then
  local most = tonumber(ARGV[3])
  if held == -1 or held > most then
    redis.call('PEXPIRE', KEYS[2], most)
    held = most
  end
  return {2, clock_text, held}
end

local function num(text, lo, hi)
  local n = tonumber(text)
  if n and n >= lo and n <= hi then return n end
end

local function int(text, lo)
  local n = num(text, lo, MAX)
  if n and n == floor(n) then return n + 0 end -- no negative zero
end

-- Configurations: a table of the eight fields and what follows from them.

local CONFIG = '^kind=(%l+) pay=(%l+) rate=([%d.e+-]+) size=([%d.e+-]+) floor=([%d.e+-]+)' ..
  ' warmup=([%d.e+-]+) cold=([%d.e+-]+) version=([%d.e+-]+)$'

local function derive(c)
  c.interval = 1e6 / c.rate
  if c.kind == 'bursty' then
    c.max, c.cool = max_(c.floor, c.size), c.interval
    return
  end
  local cold = c.interval * c.cold
  c.threshold = 0.5 * c.warmup / c.interval
  c.max = c.threshold + 2 * c.warmup / (c.interval + cold)
  c.cool = c.warmup / c.max
  c.slope = (cold - c.interval) / (c.max - c.threshold)
end

local function valid(c)
  if not (c.rate > 0 and c.rate <= MAX and c.interval <= MAX) then return false end
  if not (c.size >= 0 and c.size <= MAX) or (c.floor ~= 0 and c.floor ~= 1) then return false end
  if c.version < 0 or c.version > MAX then return false end
  if c.kind == 'bursty' then return c.warmup == 0 and c.cold == 0 end
  return c.warmup >= 1 and c.warmup <= MAX and c.cold > 1 and c.cold * c.interval <= MAX
    and c.max > 0 and c.max <= MAX and c.max > c.threshold and c.slope <= 1.7976931348623157e308
    and c.size == 0 and c.floor == 0
end

local function config(text)
  local kind, pay, rate, size, least, warmup, cold, version = text:match(CONFIG)
  if (kind ~= 'bursty' and kind ~= 'warmup') or (pay ~= 'now' and pay ~= 'later') then return end
  local c = {
    kind = kind, pay = pay, rate = num(rate, 0, MAX), size = num(size, 0, MAX), floor = num(least, 0, 1),
    warmup = int(warmup, 0), cold = num(cold, 0, MAX), version = int(version, 0),
  }
  if not (c.rate and c.size and c.floor and c.warmup and c.cold and c.version) then return end
  derive(c)
  if valid(c) then return c end
end

local function config_text(c)
  return fmt('kind=%s pay=%s rate=%.17g size=%.17g floor=%.17g warmup=%.17g cold=%.17g version=%.17g',
    c.kind, c.pay, c.rate, c.size, c.floor, c.warmup, c.cold, c.version)
end

local function hash(c)
  local h = 0
  for _, byte in ipairs({config_text(c):byte(1, -1)}) do h = (h * 131 + byte) % 2147483647 end
  return h
end

local function same(a, b)
  return a.kind == b.kind and a.pay == b.pay and a.rate == b.rate and a.size == b.size and a.floor == b.floor
    and a.warmup == b.warmup and a.cold == b.cold and a.version == b.version
end

-- The bucket: the configuration in force c, and the account.

local mine = config(ARGV[5])
local now, c = clock, nil
local stored, next_, carry, seen, epoch, seq, tail, back, returned
local changed = false

local function begin_epoch()
  epoch, tail, back, returned = tonumber(ARGV[4]), 0, 0, ''
end

local function begin(with)
  c = with
  stored = c.max
  if c.kind == 'bursty' then stored = min(tonumber(ARGV[7]), c.max) end
  next_, carry, seen, seq = now, 0, now, 1
  begin_epoch()
end

local function resync()
  if now > next_ then
    stored = stored + (now - next_) / c.cool
    next_ = now
  end
  if stored > c.max then
    stored = c.max
    return true
  end
end

local function rescale(with)
  local old = c.max
  c = with
  if old > 0 then
    stored = min(c.max, stored * c.max / old)
  elseif c.kind == 'warmup' then
    stored = c.max
  else
    stored = 0
  end
  seq = seq + 1
end

local function stored_cost(spend)
  local micros, above = 0, stored - c.threshold
  if above > 0 then
    local slow = min(above, spend)
    local length = (c.interval + above * c.slope) + (c.interval + (above - slow) * c.slope)
    micros = slow * length / 2
    spend = spend - slow
  end
  return micros + c.interval * spend
end

local function take(n, wait)
  local spend = min(n, stored)
  local cost = (n - spend) * c.interval
  if c.kind == 'warmup' then cost = cost + stored_cost(spend) end
  local need, add = cost - carry, 0
  if need > SHORTFALL * c.interval then add = ceil(need) end
  if add > MAX or next_ + add > MAX then return false end
  local due = next_
  if c.pay == 'now' then due = next_ + add end
  if due - now > wait then return false end
  stored, next_, carry = stored - spend, next_ + add, add - need
  seq = seq + 1
  tail = seq
  return true
end

local function give_back(a)
  local g = {}
  for i = 1, 12 do g[i] = tonumber(ARGV[a + i]) end
  local g_epoch, g_tag, g_tail, g_version, id, to_stored, to_next, to_carry, g_end, spent, level, granted = unpack(g)
  if g_epoch ~= epoch then return false end
  local name, _, commas = fmt('%.0f', id), returned:gsub(',', '')
  if spent > 0 and returned ~= '' and (commas + 1 == MAX_RETURNED or (',' .. returned .. ','):find(',' .. name .. ',', 1, true)) then
    return false
  end
  local function list()
    if spent > 0 then returned = returned == '' and name or returned .. ',' .. name end
    seq = seq + 1
  end
  local same_config = g_version == c.version
  if g_tag == tail and g_tag ~= 0 then
    if not same_config then
      to_stored = stored
      if next_ ~= g_end then return false end
    end
    if not (to_next < next_ or (to_next == next_ and to_carry > carry)) and not (to_stored > stored) then return false end
    stored, next_, carry, tail = to_stored, to_next, to_carry, g_tail
    list()
    resync()
    return true
  end
  if c.kind ~= 'bursty' or not same_config or next_ > now then return false end
  local give = min(spent, c.max - (level + back + (now - granted) / c.interval))
  if not (give > 0) then return false end
  stored = min(c.max, stored + give)
  back = back + give
  list()
  tail = 0
  return true
end

local function set_rate(rate)
  local n = {
    kind = c.kind, pay = c.pay, rate = rate, size = c.size * rate / c.rate, floor = c.floor,
    warmup = c.warmup, cold = c.cold, version = max_(c.version, mine.version),
  }
  derive(n)
  if n.version == MAX or not valid(n) then return false end
  n.version = n.version + 1
  rescale(n)
  return true
end

local old = redis.call('GET', KEYS[1]) or ''
local function refuse() return {3, clock_text, old:sub(1, 80)} end

if old == '' then
  local newest = mine
  if ARGV[6] ~= '' then
    local known = config(ARGV[6])
    if known.version > mine.version and known.kind == mine.kind then newest = known end
  end
  begin(newest)
  changed = #ARGV > 7
else
  if #old > 4096 then return refuse() end
  local t = {old:match('^tb1 (kind=.- version=[%d.e+-]+) stored=([%d.e+-]+) next=([%d.e+-]+) carry=([%d.e+-]+)' ..
    ' seen=([%d.e+-]+) epoch=([%d.e+-]+) seq=([%d.e+-]+) tail=([%d.e+-]+) back=([%d.e+-]+) returned=([%d,]*)$')}
  if not t[1] then return refuse() end
  local theirs = mine
  if t[1] ~= ARGV[5] then theirs = config(t[1]) end
  stored, next_, carry, seen = num(t[2], 0, MAX), int(t[3], -MAX), num(t[4], -MAX * SHORTFALL, 1), int(t[5], -MAX)
  epoch, seq, tail, back, returned = int(t[6], 1), int(t[7], 1), int(t[8], 0), num(t[9], 0, MAX), t[10]
  if not (theirs and seq and seq <= MAX / 2 and stored and next_ and carry and seen and epoch and tail and back) then return refuse() end
  if returned ~= '' then
    local count = 0
    for id in (returned .. ','):gmatch('(.-),') do
      count = count + 1
      if not id:find('^[1-9]%d*$') or tonumber(id) > MAX / 2 then return refuse() end
    end
    if count > MAX_RETURNED then return refuse() end
  end
  c = theirs

  local behind = seen - now -- the clock, see PermitBucket.observe
  if behind > STANDSTILL then
    next_ = next_ - behind
    seen = now
    begin_epoch()
    changed = true
  end
  seen = max_(seen, now)
  now = seen

  if c ~= mine and not same(c, mine) then -- see PermitBucket.reconcile
    if c.kind ~= mine.kind then return {0, clock_text, old, ''} end
    if mine.version == 0 and c.version == 0 then
      c = mine
      begin_epoch()
    elseif mine.version > c.version or (mine.version == c.version and hash(mine) > hash(c)) then
      if mine.version == c.version then begin_epoch() end
      resync()
      rescale(mine)
      changed = true
    end
  end
end
if resync() then begin_epoch() end

local i = 8
while i <= #ARGV do
  local op, ok = ARGV[i], false
  if op == 'T' then
    local n, wait = tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
    for _ = 1, tonumber(ARGV[i + 1]) do
      if not take(n, wait) then break end -- a refusal changes nothing: the rest are refused too
      ok = true
    end
    i = i + 4
  elseif op == 'G' then
    ok = give_back(i)
    i = i + 13
  elseif op == 'S' then
    ok = set_rate(tonumber(ARGV[i + 1]))
    i = i + 2
  else
    begin(mine)
    ok = true
    i = i + 1
  end
  changed = changed or ok
end

local new = ''
if changed then
  if not (stored >= 0 and stored <= MAX and back >= 0 and back <= MAX and carry >= -MAX * SHORTFALL and carry <= 1
    and next_ >= -MAX and next_ <= MAX and seq <= MAX / 2) then
    return refuse()
  end
  new = fmt('tb1 %s stored=%.17g next=%.17g carry=%.17g seen=%.17g epoch=%.17g seq=%.17g tail=%.17g back=%.17g returned=%s',
    config_text(c), stored, next_, carry, seen, epoch, seq, tail, back, returned)
  local micros = max_(0, next_ - now) + c.max * c.cool
  redis.call('SET', KEYS[1], new, 'PX', fmt('%.0f', ceil(min(micros, MAX) / 1000) + 86400000))
end
return {0, clock_text, old, new}
