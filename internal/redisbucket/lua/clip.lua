-- Shortens a lock that has more time left than the time to live of a lock: the server's clock was set back, or it has no expiry.
--
-- KEYS[1]  the lock
-- ARGV[1]  the time to live of a lock, in milliseconds
-- returns nothing

local left = redis.call('PTTL', KEYS[1])
if left == -1 or left > tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return {}
