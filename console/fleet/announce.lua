-- Adds an event that is not an instance's own, such as a person's action on the console.
--
-- KEYS[1]  the events: a sorted set by time in milliseconds, of time:text
-- ARGV     1 the text
-- returns  'done' and the time in milliseconds
-- clock    the server's

local DAY, MOST_EVENTS = 86400000, 1000

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function text(n) return string.format('%.0f', n) end

redis.call('ZADD', KEYS[1], text(now), text(now) .. ':' .. ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', text(now - DAY))
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - MOST_EVENTS)
redis.call('PEXPIRE', KEYS[1], DAY)
return {'done', text(now)}
