-- Decides the batches of a group on the buckets of its members, all of them in one atomic step: either all states are written or none. It is
-- applyTogether of together.go in Lua, equal to the last bit, and follows bucket.lua. TestGroupDifferential compares them.
--
-- KEYS      for each member: its bucket's key and its lock. While a process holds one of the locks, nothing is decided.
--           While their slot moves, the keys of the buckets that exist, see moves.go
-- ARGV[1]   to ARGV[4] as in apply.lua
-- ARGV[5]   'all' if a joint request takes permits from all members or from none, 'any' if from the one that is due first
-- ARGV[6]   the joint requests: a count of equal ones, and for each member permits and the longest wait in microseconds, for each kind of request
-- then for each member two as in apply.lua: expected and new, or '' and the batch without the joint requests. Either all members have a prediction
-- or none has
-- then, while their slot moves, the keys of all buckets
-- returns the time, then for each member one string as in apply.lua. Unless each of them is '' or begins with 'decided', nothing was written: then '-'
-- stands for the members that are not the reason; TRYAGAIN if a bucket is not here and cannot be made here, since the slot moves away

local moves = #KEYS ~= #ARGV - 6
local n = moves and (#ARGV - 6) / 3 or #KEYS / 2
local buckets = {}
for i = 1, n do buckets[i] = moves and ARGV[6 + 2 * n + i] or KEYS[2 * i - 1] end
local answers = {clock_text}

-- stop returns the reply for a reason why nothing is written, by a member.
local function stop(member, answer)
  for i = 1, n do answers[1 + i] = '-' end
  answers[1 + member] = answer
  return answers
end

local olds = {}
for i = 1, n do
  local lock = buckets[i] .. ':lock'
  local held = moves and locked(lock) or call('PTTL', lock)
  if held ~= -2 then
    if held == -1 or held > tofloat(ARGV[2]) then
      call('PEXPIRE', lock, ARGV[2])
      held = ARGV[2]
    end
    return stop(i, 'locked ' .. held)
  end
end
for i = 1, n do
  local old = get(buckets[i])
  if moves and elsewhere(old) then return redis.error_reply('TRYAGAIN a bucket of the group is not here') end
  if type(old) == 'table' then return stop(i, 'error ' .. old.err) end
  olds[i] = old
end

if ARGV[7] ~= '' then
  local as_of = tofloat(ARGV[3])
  local right = as_of and as_of <= clock and clock - as_of <= GUESS_AGE and (ARGV[4] == '' or clock <= tofloat(ARGV[4]))
  for i = 1, n do right = right and olds[i] == ARGV[5 + 2 * i] end
  if not right then return stop(1, 'wrong') end
  for i = 1, n do
    local done = try('SET', buckets[i], ARGV[6 + 2 * i], 'KEEPTTL')
    if done.err then return stop(i, 'error ' .. done.err) end -- if Redis refuses a write, it refuses the first
    answers[1 + i] = ''
  end
  return answers
end

local changed, take, close, run, requests = {}, {}, {}, {}, {}
for i = 1, n do
  local open, answer, _
  _, open, run[i], take[i], close[i] = make_bucket()
  answer, changed[i], requests[i] = open(olds[i], ARGV[6 + 2 * i])
  if answer then
    if answer:sub(1, 8) ~= 'decided\n' then return stop(i, answer) end
    for m = 1, n do answers[1 + m] = 'decided\n' .. olds[m] .. '\n' end -- a bucket of the other kind: the caller's replay fails
    return answers
  end
  if olds[i] == '' and ARGV[6] ~= '' then changed[i] = true end
end
for i = 1, n do
  if run[i](requests[i]) then changed[i] = true end
end

local words = {}
for word in ARGV[6]:gmatch('%S+') do words[#words + 1] = tofloat(word) end
local any = ARGV[5] == 'any'
for at = 1, #words, 1 + 2 * n do
  for _ = 1, words[at] do
    local first, least, fits = nil, nil, 0
    for i = 1, n do
      local wait = take[i](words[at + 2 * i - 1])
      if wait and wait <= words[at + 2 * i] then
        fits = fits + 1
        if not least or wait < least then first, least = i, wait end
      elseif not any then
        break
      end
    end
    if any and first then
      take[first](words[at + 2 * first - 1], words[at + 2 * first])
      changed[first] = true
    elseif not any and fits == n then
      for i = 1, n do
        take[i](words[at + 2 * i - 1], words[at + 2 * i])
        changed[i] = true
      end
    else
      break -- a refusal changes nothing, so the rest are refused, too
    end
  end
end

local new, ttl = {}, {}
for i = 1, n do
  if changed[i] then
    new[i], ttl[i] = close[i]()
    if not new[i] then return stop(i, 'corrupt ' .. olds[i]:sub(1, 512)) end
  end
end
for i = 1, n do
  if new[i] then
    local done = try('SET', buckets[i], new[i], 'PX', ttl[i])
    if done.err then return stop(i, 'error ' .. done.err) end -- see above
  end
  answers[1 + i] = 'decided\n' .. olds[i] .. '\n' .. (new[i] or '')
end
return answers
