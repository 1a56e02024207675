-- Ends and renews leases while the slot of a semaphore moves and its keys are on two servers. It needs one key, which is always on one of them.
-- A release ends the lease: the next batch that can be decided removes the holder as one whose lease has expired. Until then its permits count
-- as held.
--
-- KEYS      held, see apply.lua
-- ARGV      the lease in microseconds, the number of ids to leave, these, and the ids to renew
-- returns   the time, then for each id 1 if it was held and is done, otherwise 0: it is unknown here, waits, or has expired

local t = redis.call('TIME')
local now, lease, leaves = t[1] * 1000000 + t[2], tonumber(ARGV[1]), tonumber(ARGV[2])
local reply = {string.format('%.0f', now)}
for i = 3, #ARGV do
  local score, ends = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or 0), now + lease
  local done = score > now
  if i - 2 <= leaves then ends = 0 end
  if done and (ends == 0 or ends > score) then redis.call('ZADD', KEYS[1], string.format('%.0f', ends), ARGV[i]) end
  reply[#reply + 1] = done and '1' or '0'
end
return reply
