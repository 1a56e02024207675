-- Reads a page of a hash, and skips fields that are too large.
--
-- KEYS[1]  the hash
-- ARGV     1 the cursor, 0 at first; 2 about how many fields; 3 the most bytes of a field with its value, and 4 of all of
-- them together
--
--  returns  the next cursor, 0 at the end; how many fields were too large; then fields and values

local part = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local most, all, large, reply = tonumber(ARGV[3]), tonumber(ARGV[4]), 0, {part[1], ''}
for i = 1, #part[2], 2 do
  local size = #part[2][i] + #part[2][i + 1]
  if size <= most and size <= all then
    all = all - size
    reply[#reply + 1] = part[2][i]
    reply[#reply + 1] = part[2][i + 1]
  else
    large = large + 1
  end
end
reply[2] = tostring(large)
return reply
