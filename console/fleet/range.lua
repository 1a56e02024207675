-- Reads a part of a sorted set by its scores, the highest first, and skips members that are too large.
--
-- KEYS[1]  the sorted set
-- ARGV     1 the least score; 2 how many; 3 how many bytes one may have
-- returns  the time in milliseconds; how many were too large; then members and scores
-- clock    the server's

local time = redis.call('TIME')
local list = redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', ARGV[1], 'WITHSCORES', 'LIMIT', 0, ARGV[2])
local most, reply = tonumber(ARGV[3]), {string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), 0}
for i = 1, #list, 2 do
  if #list[i] <= most then
    reply[#reply + 1] = list[i]
    reply[#reply + 1] = list[i + 1]
  else
    reply[2] = reply[2] + 1
  end
end
reply[2] = tostring(reply[2])
return reply
