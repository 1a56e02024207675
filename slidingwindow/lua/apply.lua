-- Counts permits, decides requests, and returns the whole window. It is counts of counts.go in Lua: change both or none;
-- TestDifferential compares them. All numbers are integers below 2^53.
--
-- KEYS[1]   the limiter's key, a string: sw1 epoch=E seen=T [back=B] [limit=L version=V] last:count last:count …, see codec.go
-- KEYS[2]   only with ARGV[8]: the epoch and the number of the last report of this process that was counted
-- ARGV[1]   now, in microseconds, or '' for the server's clock (TIME, read once)
-- ARGV[2]   window, ARGV[3] resolution, in microseconds; the second divides the first
-- ARGV[4]   limit, ARGV[10] its version: the newest is in force, and of two of one version the lower; 0: the state's, if it has one
-- ARGV[5]   time to live in milliseconds
-- ARGV[6]   deadline in microseconds of that clock, '' for none: after it the script does nothing
-- ARGV[7]   the epoch of a new state: a random integer
-- ARGV[8]   last:count … that it admitted and reports with ARGV[15]; '' for none. A report that was counted in this epoch is not counted again
-- ARGV[9]   permits:times … requests to decide, in their order; '' for none
-- ARGV[11]  a limit that becomes the next version, '' for none
-- ARGV[12]  time:count … to refund, '' for none: in the sub-intervals of these times, to which all steps back of the clock (back=B) are added
-- ARGV[13]  the epoch of the state that they were admitted in; in another, nothing is refunded
-- ARGV[14]  1: ARGV[1] is never set back: if it is more than 2 s behind, the script does nothing
-- ARGV[15]  the number of the report, '' without one
-- returns   clock and the time of the decision; the state, '' if there is none; how many of each of ARGV[9] were granted
--           | late, clock | behind, how far | error CORRUPT or OVERFLOW; then nothing was written

local MAX, MOST, LIMIT, PARTS, STANDSTILL, SIZE = 9007199254740992, 137438953472, 2147483648, 1441, 2000000, 65536
local floor, max, fmt = math.floor, math.max, string.format

local clock = ARGV[1]
if clock ~= '' then
  clock = tonumber(clock)
else
  local t = redis.call('TIME')
  clock = t[1] * 1000000 + t[2]
end
if ARGV[6] ~= '' and clock > tonumber(ARGV[6]) then return {'late', fmt('%.0f', clock)} end
local window, resolution, limit = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local old = redis.call('GET', KEYS[1])
local function corrupt() return redis.error_reply('CORRUPT ' .. fmt('%q', old:sub(1, 80)):gsub('[^%w%p ]', '?')) end

-- The parts, oldest first: one for each sub-interval in which permits were admitted.
local now, epoch, back, changed = clock, ARGV[7], 0, false
local version = 0
local index, last, count, text, n, sum = {}, {}, {}, {}, 0, 0
local first

local function push(l, c, t)
  local i = floor(l / resolution)
  if i < first then return end
  if n > 0 and index[n] == i then
    last[n], count[n], text[n] = max(last[n], l), count[n] + c, nil
  else
    n = n + 1
    index[n], last[n], count[n], text[n] = i, l, c, t
  end
  sum = sum + c
end

local function at(time)
  now = time
  first = floor(now / resolution) - window / resolution
end

if old then
  if #old > SIZE then return corrupt() end
  local e, s, rest = old:match('^sw1 epoch=(%d+) seen=(%-?%d+)(.*)$')
  if not e then return corrupt() end
  local seen = tonumber(s)
  if tonumber(e) < 1 or tonumber(e) > MAX or seen < -MAX or seen > MAX then return corrupt() end
  epoch = e
  local b, l, v, more
  b, more = rest:match('^ back=(%d+)(.*)$')
  if b then back, rest = tonumber(b), more end
  l, v, more = rest:match('^ limit=(%d+) version=(%d+)(.*)$')
  if l then
    l, v, rest = tonumber(l), tonumber(v), more
    if l < 1 or l > LIMIT or v < 1 or v > MAX then return corrupt() end
    if v > tonumber(ARGV[10]) or v == tonumber(ARGV[10]) and l <= limit then limit, version = l, v end
  end
  if b and (back < 1 or back > MAX) then return corrupt() end
  local shift = seen - clock
  local behind = shift > STANDSTILL and ARGV[14] == '1'
  if shift > STANDSTILL then -- the clock was set back: the counts move with it
    at(clock)
    back, changed = back + shift, true
    if back > MAX then back, epoch = 0, ARGV[7] end
  else
    shift = 0
    at(max(seen, clock))
  end
  local size, before, parts = 0, -MAX - 1, 0
  for t, l, c in rest:gmatch('( (%-?%d+):(%d+))') do
    size, parts = size + #t, parts + 1
    l, c = tonumber(l), tonumber(c)
    if l <= before or l > seen or c < 1 or c > MOST or parts > PARTS then return corrupt() end
    before = l
    if shift ~= 0 then push(l - shift, c) else push(l, c, t) end
  end
  if size ~= #rest then return corrupt() end
  if behind then return {'behind', fmt('%.0f', seen - clock)} end
else
  at(clock)
end

if version == 0 and ARGV[10] ~= '0' then
  version, changed = tonumber(ARGV[10]), true
end
if ARGV[11] ~= '' and version < MAX then
  limit, version, changed = tonumber(ARGV[11]), version + 1, true
end

-- used returns the permits that count against the limit now.
local function used()
  if n == 0 or index[1] ~= first then return sum end
  if last[1] < now - window then return sum - count[1] end
  return sum
end

local report = KEYS[2] and epoch .. ' ' .. ARGV[15]
if report and redis.call('GET', KEYS[2]) ~= report then
  local all = {}
  for i = 1, n do all[i] = {last[i], count[i]} end
  for l, c in ARGV[8]:gmatch('(%-?%d+):(%d+)') do
    all[#all + 1] = {math.min(now, tonumber(l)), tonumber(c)}
  end
  table.sort(all, function(a, b) return a[1] < b[1] end)
  n, sum, changed = 0, 0, true
  for i = 1, #all do push(all[i][1], all[i][2]) end
end

if epoch == ARGV[13] then
  for t, c in ARGV[12]:gmatch('(%-?%d+):(%d+)') do
    local at, j = tonumber(t) - back, 1
    local i = floor(at / resolution)
    while j <= n and index[j] < i do j = j + 1 end
    if j <= n and index[j] == i and (back == 0 or at >= now - window) then -- see counts.remove
      c = math.min(tonumber(c), count[j])
      count[j], text[j], sum, changed = count[j] - c, nil, sum - c, true
      if count[j] == 0 then
        for k = j, n do
          index[k], last[k], count[k], text[k] = index[k + 1], last[k + 1], count[k + 1], text[k + 1]
        end
        n = n - 1
      end
    end
  end
end

local function add(c)
  if c > 0 then
    push(now, c)
    changed = true
  end
end

local granted = {}
for permits, times in ARGV[9]:gmatch('(%d+):(%d+)') do
  permits, times = tonumber(permits), tonumber(times)
  local fit = math.min(times, max(0, floor((limit - used()) / permits)))
  add(fit * permits)
  granted[#granted + 1] = fmt('%.0f', fit)
end

local new = old or ''
if changed then
  for i = 1, n do
    if count[i] > MOST then return redis.error_reply('OVERFLOW') end
    if not text[i] then text[i] = fmt(' %.0f:%.0f', last[i], count[i]) end
  end
  new = 'sw1 epoch=' .. epoch .. fmt(' seen=%.0f', now)
  if back > 0 then new = new .. fmt(' back=%.0f', back) end
  if version > 0 then new = new .. fmt(' limit=%.0f version=%.0f', limit, version) end
  new = new .. table.concat(text, '', 1, n)
  redis.call('SET', KEYS[1], new, 'PX', ARGV[5])
  if report then redis.call('SET', KEYS[2], report, 'PX', ARGV[5]) end
end
return {fmt('%.0f %.0f', clock, now), new, table.concat(granted, ' ')}
