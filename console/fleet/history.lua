-- Reads hours of a limit's history, and skips values that are too large to be one.
--
-- KEYS     for each hour the bitmap of its minutes, and the limit's hash
-- returns  for each hour the bitmap, the number of strings that follow, and as many: fields and values

local function failed(r) return type(r) == 'table' and not string.find(r.err, 'WRONGTYPE', 1, true) end

local reply = {}
for i = 1, #KEYS, 2 do
  local minutes, points = redis.pcall('GETRANGE', KEYS[i], 0, 7), {}
  local n = redis.pcall('HLEN', KEYS[i + 1])
  if failed(minutes) then return minutes end
  if failed(n) then return n end
  if type(n) == 'number' and n <= 120 then
    for j, s in ipairs(redis.call('HGETALL', KEYS[i + 1])) do points[j] = #s <= 200 and s or '' end
  end
  reply[#reply + 1] = type(minutes) == 'string' and minutes or ''
  reply[#reply + 1] = tostring(#points)
  for _, s in ipairs(points) do reply[#reply + 1] = s end
end
return reply
