-- What apply.lua and group.lua share; each of them follows it in one script. It is the arithmetic of PermitBucket in permit_state.go, equal to the
-- last bit: change both or none; TestDifferential compares them.
--
-- ARGV[1]   now, in microseconds, or '' for the server's clock (TIME, read once)

local GUESS_AGE = 100000 -- microseconds
local LONGEST = 4096 -- no state has more bytes
local KEYS, ARGV, fmt, call, try = KEYS, ARGV, string.format, redis.call, redis.pcall
local unpack = unpack or table.unpack -- Lua 5.1, or later

-- All numbers here are floats, as in Lua 5.1. From Lua 5.3 on tonumber also returns integers, whose arithmetic wraps at 64 bits.
local tofloat = tonumber
if math.type then
  function tofloat(text)
    local n = tonumber(text)
    return n and n + 0.0
  end
end

local clock, clock_text = ARGV[1], ARGV[1]
if clock ~= '' then
  clock = tofloat(clock)
else
  local t = call('TIME')
  clock = t[1] * 1000000.0 + t[2]
  clock_text = fmt('%s%06d', t[1], t[2]) -- %.0f of a float takes longer
end

-- make_bucket returns the functions that decide on one bucket: decide, and what it consists of. It is called only for a batch without a prediction,
-- since creating the functions and their constants takes longer than writing a right prediction.
local function make_bucket()
  local MAX, SHORTFALL, NOISE, STANDSTILL, MAX_RETURNED = 9007199254740992, 1e-9, 1e-3, 2000000, 32
  local KEPT, RENEWED_KEPT = 90000000, 60000 -- milliseconds, see PermitBucket.ttlMillis
  local MAX_SETTLED, SETTLEMENT = 8, MAX / 4 -- see PermitBucket.enlistSettled
  local MIN_RATE, MAX_INTERVAL, MAX_NONCE, LINEAGE = 1e-9, 1e15, 1099511627776, 67108864
  local floor, ceil, min, max_ = math.floor, math.ceil, math.min, math.max
  -- %d is twice as fast, but has only 32 bits on systems with a 32-bit long.
  local STATE = 'tb1 epoch=%d seq=%d tail=%d stored=%.17g next=%d carry=%.17g debt=%d back=%.17g:%s%s %s'
  if fmt('%d', MAX) ~= '9007199254740992' then STATE = STATE:gsub('%%d', '%%.0f') end

  -- A configuration is a table of its fields and the values derived from them.

  local function config(text)
    local kind, pay, rate, a, b, version = text:match('^(%l+) (%l+) (%S+) (%S+) (%S+) (%S+)$')
    rate, a, b, version = tofloat(rate), tofloat(a), tofloat(b), tofloat(version)
    if not (rate and a and b and version) or (pay ~= 'now' and pay ~= 'later') then return end
    local interval = 1e6 / rate
    if kind == 'bursty' then
      return {text = text, kind = kind, pay = pay, rate = rate, size = a, least = b, warmup = 0, cold = 0, version = version,
        interval = interval, max = max_(b, a), cool = interval}
    elseif kind == 'warmup' then
      local cold, threshold = interval * b, 0.5 * a / interval
      local most = threshold + 2 * a / (interval + cold)
      return {text = text, kind = kind, pay = pay, rate = rate, size = 0, least = 0, warmup = a, cold = b, version = version,
        interval = interval, max = most, cool = a / most, threshold = threshold, slope = (cold - interval) / (most - threshold)}
    end
  end

  -- The current bucket: the configuration mine of the batch, the one in force c, and the account.

  local mine, c, now, initial, transient, epoch_name, nonce
  local stored, next_, carry, seen, epoch, seq, tail, back, returned, held, paused
  local settled -- this batch has given permits back before

  local function begin_epoch()
    epoch, tail, back, returned = epoch_name, 0, 0, ''
  end

  local function succeed() -- see PermitBucket.succeed
    local name, kept = epoch - (epoch - 1) % LINEAGE + (epoch_name - 1) % LINEAGE, {}
    for id in returned:gmatch('%d+') do
      if tofloat(id) >= SETTLEMENT then kept[#kept + 1] = id end
    end
    begin_epoch()
    epoch, returned = name, table.concat(kept, ',')
  end

  local function begin(with)
    c = with
    stored = c.max
    if c.kind == 'bursty' then stored = min(initial, c.max) end
    next_, carry, seen, seq, held, paused = now, 0, now, 1, 0, 0
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

  local function take(n, wait)
    local spend = min(n, stored)
    local cost = (n - spend) * c.interval
    if c.kind == 'warmup' then -- the area under the curve, see curve.storedCost
      local micros, above, rest = 0, stored - c.threshold, spend
      if above > 0 then
        local slow = min(above, rest)
        local length = (c.interval + above * c.slope) + (c.interval + (above - slow) * c.slope)
        micros = slow * length / 2
        rest = rest - slow
      end
      cost = cost + (micros + c.interval * rest)
    end
    local need, add = cost - carry, 0
    if need > SHORTFALL * c.interval then add = ceil(need - min(SHORTFALL * c.interval, NOISE)) end
    if add > MAX or next_ + add > MAX then return false end
    local due = next_
    if c.pay == 'now' then due = next_ + add end
    if not wait then return due - now end -- a question, see PermitBucket.quote
    if due - now > wait then return false end
    stored, next_, carry = stored - spend, next_ + add, add - need
    seq = seq + 1
    tail = nonce + seq
    return true
  end

  -- Functions that most batches do not need are created on demand.
  local rare_
  local function rare()
    if rare_ then return rare_ end
    rare_ = {}

    local function text(n)
      local a, b = n.size, n.least
      if n.kind == 'warmup' then a, b = n.warmup, n.cold end
      return fmt('%s %s %.17g %.17g %.17g %.17g', n.kind, n.pay, n.rate, a, b, n.version)
    end

    local function hash(n)
      local h = 0
      for _, byte in ipairs({text(n):byte(1, -1)}) do h = (h * 131 + byte) % 2147483647 end
      return h
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

    function rare_.valid(n)
      if not (n.rate >= MIN_RATE and n.rate <= MAX) then return false end
      if not (n.size >= 0 and n.size <= MAX) or (n.least ~= 0 and n.least ~= 1) then return false end
      if not (n.version >= 0 and n.version <= MAX and n.version == floor(n.version)) then return false end
      if n.kind == 'bursty' then return true end
      return n.warmup >= 1 and n.warmup <= MAX and n.warmup == floor(n.warmup) and n.cold > 1 and n.cold <= MAX
        and n.cold * n.interval <= MAX_INTERVAL and n.max > 0 and n.max <= MAX and n.max > n.threshold and n.slope <= 1.7976931348623157e308
    end

    function rare_.same_content()
      return c.pay == mine.pay and c.rate == mine.rate and c.size == mine.size and c.least == mine.least
        and c.warmup == mine.warmup and c.cold == mine.cold
    end

    function rare_.reconcile() -- see PermitBucket.reconcile; returns whether the state has changed
      if c.version == mine.version and rare_.same_content() then return end
      if mine.version == 0 and c.version == 0 then
        c = mine
        succeed()
      elseif mine.version > c.version or (mine.version == c.version and hash(mine) > hash(c)) then
        if mine.version == c.version then succeed() end
        resync()
        rescale(mine)
        return true
      end
    end

    local function unsold(n) -- see PermitBucket.unsold
      local floor_ = now
      if paused > 0 then floor_ = max_(now, held) end
      local give = n * c.interval
      local debt = (next_ - floor_) - carry
      local whole = floor(give + carry)
      if give <= debt and whole <= next_ - floor_ then
        next_, carry = next_ - whole, give + carry - whole
      else
        next_, carry = floor_, 0
        if c.kind == 'bursty' then stored = stored + (give - debt) / c.interval end
      end
    end

    local function enlist(id) -- adds a number to the list; a full one drops the oldest place
      local ids, oldest = {}, 1
      for text in returned:gmatch('%d+') do
        ids[#ids + 1] = text
        if tofloat(text) < tofloat(ids[oldest]) then oldest = #ids end
      end
      if #ids == MAX_RETURNED then table.remove(ids, oldest) end
      ids[#ids + 1] = fmt('%.0f', id)
      returned = table.concat(ids, ',')
    end

    local function listed(id) return (',' .. returned .. ','):find(fmt(',%.0f,', id), 1, true) end

    local function enlist_settled(id) -- see PermitBucket.enlistSettled
      if listed(id) then return end
      local ids, first, count = {}, nil, 0
      for text in returned:gmatch('%d+') do
        ids[#ids + 1] = text
        if tofloat(text) >= SETTLEMENT then first, count = first or #ids, count + 1 end
      end
      if count == MAX_SETTLED then
        table.remove(ids, first)
        returned = table.concat(ids, ',')
      end
      enlist(id)
    end

    function rare_.was_settled() return listed(SETTLEMENT + nonce) end

    function rare_.give_back(g)
      local g_epoch, g_tag, g_tail, g_version, id, to_stored, to_next, to_carry, g_end, spent, level = unpack(g)
      if g_epoch ~= epoch then return false end
      if spent > 0 and returned ~= '' then
        local count, oldest = 0, MAX
        for text in returned:gmatch('%d+') do
          if tofloat(text) == id then return false end
          count, oldest = count + 1, min(oldest, tofloat(text))
        end
        if count == MAX_RETURNED and id < oldest then return false end
      end
      local function list()
        seq = seq + 1
        if spent > 0 then enlist(id) end
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
      if c.kind ~= 'bursty' or not same_config then return false end
      local give = min(spent, c.max - (level + back + (next_ - g_end) / c.interval))
      if not (give > 0) or (g_tag == 0 and give < spent) then return false end
      if g_end - now > give * c.interval then stored = stored + give else unsold(give) end
      stored, back = min(c.max, stored), back + give
      list()
      tail = 0
      return true
    end

    local function next_version(rate, size, least) -- returns nothing if it would not be valid
      local version = max_(c.version, mine.version)
      if version == MAX then return end
      local n = config(text({kind = c.kind, pay = c.pay, rate = rate, size = size, least = least,
        warmup = c.warmup, cold = c.cold, version = version + 1}))
      if n and rare_.valid(n) then return n end
    end

    function rare_.set_rate(rate)
      local n = next_version(rate, c.size * rate / c.rate, c.least)
      if not n then return false end
      rescale(n)
      return true
    end

    function rare_.set_rate_and_burst(rate, most)
      if c.kind ~= 'bursty' then return false end
      local n = next_version(rate, most + 0, most < 1 and 0 or 1) -- no negative zero
      if not n then return false end
      c = n
      stored = min(stored, c.max)
      seq = seq + 1
      return true
    end

    function rare_.hold(d)
      local till, longer = now + d, d
      if paused > 0 then longer = till - max_(now, held) end
      if longer <= 0 or next_ + longer > MAX then return false end
      if c.kind == 'bursty' then stored = 0 else stored = min(c.max, stored + longer / c.cool) end
      next_, held, paused = next_ + longer, till, paused + longer
      succeed()
      seq = seq + 1
      return true
    end

    function rare_.give_unused(n, of_epoch, of_id) -- see PermitBucket.settle
      if settled or floor((of_epoch - 1) / LINEAGE) ~= floor((epoch - 1) / LINEAGE) or of_id > seq then return false end
      enlist_settled(SETTLEMENT + nonce)
      unsold(n)
      seq = seq + 1
      tail, back = nonce + seq, back + n
      if stored > c.max or back > MAX then
        stored = min(stored, c.max)
        begin_epoch()
      end
      return true
    end

    function rare_.begin_counted() -- see PermitBucket.beginCounted
      local counted, s, n, ca = c.kind == mine.kind, stored, next_, carry
      if paused > 0 then n = max_(now, n - max_(0, held - now)) end
      begin(mine)
      if counted then stored, next_, carry = min(s, c.max), n, ca end
    end

    function rare_.read_hold(text)
      local h, p = text:match('^ hold=(%S+):(%S+)$')
      held, paused = tofloat(h), tofloat(p)
      if held then held = held + 0 end -- no negative zero
      return held and paused and held >= -MAX and held <= MAX and held % 1 == 0 and paused >= 1 and paused <= MAX and paused % 1 == 0
    end

    function rare_.hold_text() return fmt(' hold=%.0f:%.0f', held, paused) end

    function rare_.config_text() return text(c) end

    return rare_
  end

  -- Reads the account; returns nothing if the text is not a state. Numbers are decimal: tonumber would accept hexadecimal ones, too.
  local function read(old)
    local e, q, ta, s, n, ca, d, ba, re, ho, conf = old:match('^tb1 epoch=(%S+) seq=(%S+) tail=(%S+) stored=(%S+)' ..
      ' next=(%S+) carry=(%S+) debt=(%S+) back=([%d.e+-]+):([%d,]*)( ?[hold=%d.e+:-]*) (%l+ .+)$')
    if not conf or old:find('0x', 1, true) or old:find('0X', 1, true) then return end
    c = mine
    if conf ~= mine.text then
      c = config(conf)
      if not c or not rare().valid(c) then return end
    end
    held, paused = 0, 0
    if ho ~= '' and not rare().read_hold(ho) then return end
    local debt
    stored, next_, carry, debt, epoch, seq, tail, back, returned =
      tofloat(s), tofloat(n), tofloat(ca), tofloat(d), tofloat(e), tofloat(q), tofloat(ta), tofloat(ba), re
    if not (stored and next_ and carry and debt and epoch and seq and tail and back) then return end
    if not (stored >= 0 and stored <= MAX and next_ >= -MAX and next_ <= MAX and next_ % 1 == 0 and carry >= -MAX * SHORTFALL
      and carry <= 1 and debt >= -MAX and debt <= MAX and debt % 1 == 0 and epoch >= 1 and epoch <= MAX and epoch % 1 == 0
      and seq >= 1 and seq <= MAX / 2 and seq % 1 == 0 and tail >= 0 and tail <= MAX and tail % 1 == 0
      and back >= 0 and back <= MAX) then return end
    seen = next_ - debt
    if seen < -MAX or seen > MAX then return end
    next_, tail = next_ + 0, tail + 0 -- no negative zero
    if returned ~= '' then
      local count = 0
      for id in (returned .. ','):gmatch('(.-),') do
        count = count + 1
        if not id:find('^[1-9]%d*$') or tofloat(id) > MAX / 2 then return end
      end
      if count > MAX_RETURNED then return end
    end
    return true
  end

  -- open prepares the bucket for a batch, see PermitBucket.open. It returns the answer if there is nothing to decide, otherwise nil, whether the
  -- state has changed, and the requests.
  local function open(old, batch)
    local own, known, name, first, kept_as, deadline, requests = batch:match('^([^\n]*)\n([^\n]*)\n(%S+) (%S+) (%l+) (%S*)\n(.*)$')
    if deadline ~= '' and clock > tofloat(deadline) then return 'late' end
    now, mine, initial, transient, epoch_name = clock, config(own), tofloat(first), kept_as == 'transient', tofloat(name)
    nonce = epoch_name % MAX_NONCE -- a grant's tag is its number plus the nonce, see Place in internal/permit
    local changed = false
    if old == '' then
      local newest = mine
      if known ~= '' then
        local k = config(known)
        if k.version > mine.version and k.kind == mine.kind then newest = k end
      end
      begin(newest)
      changed = requests ~= ''
    else
      if #old > LONGEST or not read(old) then return 'corrupt ' .. old:sub(1, 512) end
      local behind = seen - now -- a clock that was set back, see PermitBucket.observe
      if behind > STANDSTILL then
        next_ = next_ - behind
        if paused > 0 then held = held - behind end
        seen = now
        succeed()
        changed = true
      end
      seen = max_(seen, now)
      now = seen
      if c ~= mine then
        if c.kind == mine.kind then
          if rare().reconcile() then changed = true end
        elseif not requests:find('^[RQ]') then
          return 'decided\n' .. old .. '\n'
        end
      end
    end
    if resync() then begin_epoch() end
    settled = returned ~= '' and rare().was_settled()
    return nil, changed, requests
  end

  -- run decides requests in order. It returns whether the state has changed.
  local function run(requests)
    local changed, words, at = false, {}, 1
    for word in requests:gmatch('%S+') do words[#words + 1] = word end
    local function number()
      at = at + 1
      return tofloat(words[at])
    end
    while words[at] do
      local op, ok = words[at], false
      if op == 'T' then
        local count, n, wait = number(), number(), number()
        if count > 1 and c.kind == 'bursty' and stored >= n and next_ - now <= wait and -carry <= SHORTFALL * c.interval then
          -- Requests paid by stored permits are granted together: subtracting whole numbers from stored is exact in either way,
          -- and neither next_ nor carry changes.
          local together = min(count, floor(stored / n))
          if together * n <= stored then
            stored, seq, count, ok = stored - together * n, seq + together, count - together, true
            tail = nonce + seq
          end
        end
        for _ = 1, count do
          if not take(n, wait) then break end -- a refusal changes nothing, so the rest are refused, too
          ok = true
        end
      elseif op == 'G' then
        local g = {}
        for i = 1, 11 do g[i] = number() end
        ok = rare().give_back(g)
      elseif op == 'L' then
        local n = min(number(), floor(stored + SHORTFALL))
        ok = n >= 2 and (take(n, 0) or (n > 2 and take(n - 1, 0)))
      elseif op == 'H' then
        ok = rare().hold(number())
      elseif op == 'A' then
        local n, of_epoch, of_id = number(), number(), number()
        if n > 0 then ok = take(n, MAX) else ok = rare().give_unused(-n, of_epoch, of_id) end
      elseif op == 'S' then
        ok = rare().set_rate(number())
      elseif op == 'B' then
        local rate, most = number(), number()
        ok = most and rare().set_rate_and_burst(rate, most) -- from Lua 5.2 on tonumber accepts no infinity
      elseif op == 'Q' then
        rare().begin_counted()
        ok = true
      else
        begin(mine)
        ok = true
      end
      changed = changed or ok
      at = at + 1
    end
    return changed
  end

  -- close returns the new state and its time to live; nothing if the state must not be written.
  local function close()
    local debt = next_ - seen
    if not (stored >= 0 and stored <= MAX and back >= 0 and back <= MAX and carry >= -MAX * SHORTFALL and carry <= 1
      and next_ >= -MAX and next_ <= MAX and debt >= -MAX and debt <= MAX and seq <= MAX / 2
      and held >= -MAX and held <= MAX and paused <= MAX) then return end
    local new = fmt(STATE,
      epoch, seq, tail, stored, next_, carry, debt, back, returned, paused > 0 and rare().hold_text() or '', c == mine and mine.text or rare().config_text())
    local kept = KEPT
    if (transient or c.version == 0 and paused == 0) and (c.kind == 'warmup' or initial >= c.max)
      and (c == mine or rare().same_content()) then kept = RENEWED_KEPT end
    local ttl = ceil(min(max_(0, next_ - now) + c.max * c.cool, MAX) / 1000) + kept
    return new, fmt('%.0f', ttl)
  end

  local function decide(key, old, batch)
    local answer, changed, requests = open(old, batch)
    if answer then return answer end
    if not (run(requests) or changed) then return 'decided\n' .. old .. '\n' end
    local new, ttl = close()
    if not new then return 'corrupt ' .. old:sub(1, 512) end
    local done = try('SET', key, new, 'PX', ttl)
    if done.err then return 'error ' .. done.err end
    return 'decided\n' .. old .. '\n' .. new
  end

  return decide, open, run, take, close
end

-- get reads a value that may not be a state. Of a longer value, which may have hundreds of megabytes, it returns one byte more than a state
-- has. The numbers are text, because Redis formats other arguments, which is slow.
local function get(key) return try('GETRANGE', key, '0', '4096') or '' end

-- elsewhere returns whether a reply is the refusal of a key that is not declared and not on this server, while its slot moves away.
local function elsewhere(reply) return type(reply) == 'table' and reply.err and reply.err:find('non local key', 1, true) end

-- locked returns the remaining milliseconds of a lock that is not declared; -2 if it does not exist here. See moves.go: it may be held at the
-- server to which the slot moves, but its holder cannot commit before the bucket is there, too, and then only if no other has changed it.
local function locked(lock)
  local left = try('PTTL', lock)
  if elsewhere(left) then return -2 end
  if type(left) == 'table' then call('PTTL', lock) end -- raises the error
  return left
end

